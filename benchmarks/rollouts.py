"""What do conversations cost besides the engine and the environment, and what do many at once lose?

    python benchmarks/rollouts.py [--conversations 1000] [--rounds 5]

The turn loop, environments, rewards and summaries of a rollout worker, in one process with an engine and
environments that only wait (`paced_rollouts.py`):

- overhead: processor time of a turn, next to the same engine and environment called directly
- in flight: conversations per second with 1 to 1000 at a time, next to what their delays allow
- faults: a thousand at once of which some hang, raise or lose their process; what is held before and after
- late: what a conversation takes beyond its own delays; the total of those that all run at once is that of
  the longest one, and says little about the others
- long tail: next to lockstep turns, where a batch waits for the slowest of each turn

What the delays allow is a list schedule: each conversation begins, in order, as soon as one of the places is
free, and takes the sum of its drawn seconds.
"""

import argparse
import asyncio
import gc
import heapq
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from common import Timing, publish, table_of, time_in_turns
from paced_rollouts import Delays, Fault, PacedEngine, PacedFactory, pace

from nemorl.commands.env import HeldResources
from nemorl.config.environment import EnvBase
from nemorl.config.experiment import Experiment
from nemorl.generation.router import Replica, Router
from nemorl.generation.types import GenerationRequest, SamplingParams
from nemorl.models.create import create_tiny_model
from nemorl.rollout.groups import Dropped, GroupAssignment, GroupSummary
from nemorl.rollout.worker import RolloutWorker
from nemorl.trajectories import Action, StopReason, Task

MODEL = Path("models/arithmetic")
PLAIN = Delays(turns=4.0)
SLOW = Delays(model_seconds=2.0, environment_seconds=0.5, turns=4.0, sigma=0.5)
LONG_TAIL = Delays(model_seconds=0.2, environment_seconds=0.1, turns=4.0, sigma=1.0)
FAULTS: dict[Fault, float] = {"hang": 0.02, "raise": 0.05, "die": 0.05}
DEADLINE_SECONDS = 3.0  # of a call of an environment
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def experiment(
    model: Path,
    delays: Delays,
    faults: dict[Fault, float] | None = None,
    in_flight: int | None = None,
    **env: Any,
) -> Experiment:
    factory = {"factory": "paced_rollouts:PacedFactory"}
    factory["options"] = {"delays": asdict(delays), "faults": faults or {}}  # type: ignore[assignment]
    return Experiment.model_validate(
        {
            "run_dir": "runs/bench/rollouts",
            "policy": {"model_path": str(model), "max_sequence_length": 512},
            "generation": {"max_new_tokens": 8, "concurrency": in_flight},
            "data": {"chat": False, "train": {"name": "arithmetic", "digits": 2, "size": 10_000}},
            "env": {"name": "custom", **factory, **env},
            "algorithm": {
                "name": "grpo",
                "num_steps": 1,
                "num_prompts_per_step": 2,
                "num_generations_per_prompt": 2,
            },
            "cluster": {"deadlines": {"environment": DEADLINE_SECONDS}},
        }
    )


async def sample(
    worker: RolloutWorker, assignments: Sequence[GroupAssignment]
) -> list[GroupSummary | Dropped]:
    try:
        return [outcome async for outcome in worker.run_groups(assignments)]
    finally:
        await worker.close()


def worker_of(config: Experiment, engine: PacedEngine) -> RolloutWorker:
    return RolloutWorker(config, Router([Replica("paced", engine.generate)]), store=len)


def single_samples(count: int) -> list[GroupAssignment]:
    return [GroupAssignment(task, task, num_samples=1) for task in range(count)]


def in_worker(config: Experiment, delays: Delays, count: int) -> list[GroupSummary | Dropped]:
    return asyncio.run(sample(worker_of(config, PacedEngine(delays)), single_samples(count)))


async def call_directly(delays: Delays, count: int) -> None:
    """The same conversations by the engine and the environments alone: no tokens, rewards or records."""
    engine, factory = PacedEngine(delays), PacedFactory(asdict(delays))

    async def converse(number: int) -> None:
        environment = factory.create()
        await environment.reset(Task(number, ()))
        turn, done = 0, False
        while not done:
            request = request_of(number, turn)
            async for (completed,) in engine.generate([request]):
                step = await environment.step(Action("2345", completed.tokens, StopReason.STOP))
            turn, done = turn + 1, step.done
        await environment.close()

    await asyncio.gather(*map(converse, range(count)))


def request_of(number: int, turn: int) -> GenerationRequest:
    return GenerationRequest(f"{number}/0/{turn}", np.zeros(6, np.int32), SamplingParams(), 8, turn)


async def call_in_lockstep(delays: Delays, count: int) -> None:
    """Turn by turn for the whole batch: all completions, then all answers of the environments."""
    engine, factory = PacedEngine(delays), PacedFactory(asdict(delays))
    environments = [factory.create() for _ in range(count)]
    await asyncio.gather(*(one.reset(Task(number, ())) for number, one in enumerate(environments)))
    left, turn = list(range(count)), 0
    while left:
        completed = await asyncio.gather(*(engine.answer(request_of(number, turn)) for number in left))
        actions = [Action("2345", one.tokens, StopReason.STOP) for one in completed]
        steps = await asyncio.gather(
            *(environments[n].step(action) for n, action in zip(left, actions, strict=True))
        )
        left = [number for number, step in zip(left, steps, strict=True) if not step.done]
        turn += 1
    for environment in environments:
        await environment.close()


def allowed_seconds(seconds: Iterable[float], places: int) -> float:
    """When the last of these ends if each begins, in order, at a free one of the places."""
    free = [0.0] * places
    for one in seconds:
        heapq.heapreplace(free, free[0] + one)
    return max(free)


def num_turns(delays: Delays, count: int) -> int:
    return sum(len(pace(delays, task).model) for task in range(count))


def measure_overhead(model: Path, count: int, rounds: int) -> dict[str, Any]:
    """Processor time, which other work of the machine changes less than the time of the clock."""
    config, turns = experiment(model, PLAIN), num_turns(PLAIN, count)
    seconds: dict[str, list[float]] = {"directly": [], "rollout worker": []}
    for _ in range(rounds + 1):
        start = time.process_time()
        asyncio.run(call_directly(PLAIN, count))
        between = time.process_time()
        in_worker(config, PLAIN, count)
        seconds["directly"].append(between - start)
        seconds["rollout worker"].append(time.process_time() - between)
    timings = {name: Timing(name, tuple(values[1:])) for name, values in seconds.items()}
    of_turn = {name: 1e3 * timing.median / turns for name, timing in timings.items()}
    return {
        "conversations": count,
        "turns": turns,
        "processor_milliseconds_per_turn": of_turn,
        "overhead_milliseconds_per_turn": of_turn["rollout worker"] - of_turn["directly"],
        "processor_seconds": {name: list(timing.seconds) for name, timing in timings.items()},
    }


def late_seconds(factory: PacedFactory, released: float) -> dict[str, float]:
    """Quantiles of what conversations took beyond their own delays, those that met a fault left out."""
    late = [span.late(released) for span in factory.spans]
    return {name: float(np.quantile(late, share)) for name, share in QUANTILES.items()}


def measure_in_flight(model: Path, in_flight: int, count: int) -> dict[str, Any]:
    config = experiment(model, SLOW, in_flight=in_flight)
    start = time.perf_counter()
    in_worker(config, SLOW, count)
    seconds = time.perf_counter() - start
    late = late_seconds(PacedFactory.made[-1], -math.inf)
    allowed = allowed_seconds((pace(SLOW, task).seconds for task in range(count)), in_flight)
    return {
        "in_flight": in_flight,
        "conversations": count,
        "seconds": seconds,
        "allowed_seconds": allowed,
        "conversations_per_second": count / seconds,
        "share_of_allowed": allowed / seconds,
        "late_seconds": late,
    }


def seconds_with_faults(factory: PacedFactory, task: int, max_retries: int) -> float:
    """What delays and faults allow a conversation: all its attempts, and the deadline of each that hangs."""
    drawn, seconds = pace(factory.delays, task), 0.0
    for attempt in range(max_retries + 1):
        fault, turn = factory.fault(task, attempt, len(drawn.model))
        if fault is None:
            return seconds + drawn.seconds
        seconds += sum(drawn.model[: turn + 1]) + sum(drawn.environment[:turn])
        seconds += DEADLINE_SECONDS if fault == "hang" else 0.0
    return seconds


async def measure_faults(model: Path, count: int) -> dict[str, Any]:
    """All at once: what became of each, and what the process holds before and after."""
    config = experiment(model, SLOW, FAULTS)
    await sample(worker_of(config, PacedEngine(SLOW)), single_samples(count))  # caches and allocators
    gc.collect()
    before = HeldResources.now()
    engine = PacedEngine(SLOW, num_held=count)
    worker = worker_of(config, engine)
    factory = PacedFactory.made[-1]
    start = time.perf_counter()
    outcomes = await sample(worker, single_samples(count))
    seconds = time.perf_counter() - start
    gc.collect()
    after = HeldResources.now()
    summaries = [t for outcome in outcomes if isinstance(outcome, GroupSummary) for t in outcome.trajectories]
    assert isinstance(config.env, EnvBase)
    allowed = max(seconds_with_faults(factory, task, config.env.max_retries) for task in range(count))
    return {
        "conversations": count,
        "trained": sum(t.error is None for t in summaries),
        "failed": sum(t.environment_failed for t in summaries),
        "retries": sum(t.num_retries for t in summaries),
        "faults": dict(factory.faults_met),
        "environments_created": factory.num_created,
        "environments_closed": factory.num_closed,
        "seconds": seconds,
        "allowed_seconds": allowed,
        "share_of_allowed": allowed / seconds,
        "late_seconds": late_seconds(factory, engine.released),
        "held_before": asdict(before),
        "held_after": asdict(after),
    }


def measure_long_tail(model: Path, count: int, rounds: int) -> dict[str, Any]:
    """Each conversation on its own, and in lockstep; both with all of them in flight at once."""
    config = experiment(model, LONG_TAIL)
    timings = time_in_turns(
        {
            "lockstep": lambda: asyncio.run(call_in_lockstep(LONG_TAIL, count)),
            "rollout worker": lambda: in_worker(config, LONG_TAIL, count),
        },
        rounds=rounds,
        warm_up=0,
    )
    paces = [pace(LONG_TAIL, task) for task in range(count)]
    return {
        "conversations": count,
        "allowed_seconds": max(one.seconds for one in paces),
        "mean_seconds_of_a_conversation": sum(one.seconds for one in paces) / count,
        "seconds": {name: list(timing.seconds) for name, timing in timings.items()},
        "lockstep_over_worker": timings["lockstep"].ratio_to(timings["rollout worker"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=1000, help="at a time, at most (default 1000)")
    parser.add_argument("--rounds", type=int, default=5, help="of alternatives in turns (default 5)")
    options = parser.parse_args()
    if not MODEL.exists():
        create_tiny_model(MODEL)
    count, rounds = options.conversations, options.rounds
    overhead = measure_overhead(MODEL, count, rounds)
    sizes = [size for size in (1, 10, 100, 1000) if size <= count]
    flights = [measure_in_flight(MODEL, size, 4 * size) for size in sizes]
    faults = asyncio.run(measure_faults(MODEL, count))
    tail = measure_long_tail(MODEL, min(count, 256), rounds)
    metrics = {"overhead": overhead, "in_flight": flights, "faults": faults, "long_tail": tail}
    rows = [
        {"measured": "overhead of a turn (ms)", "value": overhead["overhead_milliseconds_per_turn"]},
        *(
            {"measured": f"{one['in_flight']} in flight, share of allowed", "value": one["share_of_allowed"]}
            for one in flights
        ),
        {"measured": f"{count} with faults, share of allowed", "value": faults["share_of_allowed"]},
        *({"measured": f"late, {name} (s)", "value": late} for name, late in faults["late_seconds"].items()),
        {"measured": "lockstep over rollout worker", "value": tail["lockstep_over_worker"]},
    ]
    publish("rollouts", metrics, table_of("Rollouts", rows))


if __name__ == "__main__":
    main()
