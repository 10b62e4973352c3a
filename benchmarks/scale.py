"""What does the driver spend on a step, from 8 to 4,096 workers and to 100,000 trajectories?

    python benchmarks/scale.py [--workers 8 64 1024] [--trajectories-per-worker 24] [--steps 3]

Real: the driver of an asynchronous run (`max_staleness` 1) with schedule, collector, dispatcher, step,
advantages, batch plan, weight exchange, supervisor of engines, metrics, and the calls of Ray.
Simulated: the workers. A few real actors answer for all of them without arrays: the groups of a step end one
by one in `--generation-seconds`, and all other calls are answered at once. Half of the workers are policy
ranks, with the real number of relays, an eighth are rollout workers and the rest are engines.

A step is taken to last 100 s, in which engines and rollout workers have three health checks. CPU seconds are
those of the driver's process and all its threads, which other load on the machine changes little; of the main
thread, which runs Python, they are shown apart from those of Ray's threads. Bytes are those of the objects
that Ray serializes and deserializes in the driver. Each number of workers has a driver of its own; the first
step, which makes what later ones keep, is not counted.

Not measured are the connections to thousands of processes, Ray's other processes, and the plan of a refit of
a real model, which benchmarks/refit.py measures. Policy ranks ask the driver where the trajectories are that
they read, once for each list of them: the number is shown, and the requests of two processes are measured.
"""

import argparse
import asyncio
import multiprocessing
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import ray
from common import OUT, publish, table_of
from meter import measured
from ray._private.serialization import SerializationContext

from nemorl.algorithms.metrics import LogprobGate
from nemorl.algorithms.objective import EntropyWeight
from nemorl.algorithms.online import OnlineAlgorithm
from nemorl.algorithms.policy_gradient import PolicyGradientUpdate
from nemorl.cluster.actor import Invocation
from nemorl.cluster.group import FAN_OUT, MIN_RELAYED, Mesh, WorkerGroup, start_worker
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.cluster.worker import Worker
from nemorl.config.algorithm import OnlineConfig
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec
from nemorl.config.load import to_yaml
from nemorl.config.run import ClusterConfig
from nemorl.data.losses import LogprobStats, TrainStats
from nemorl.data.trained import Trained
from nemorl.generation.router import RouterMetrics
from nemorl.generation.types import EngineHealth, EngineStats
from nemorl.models.slices import TensorSlice
from nemorl.observe.observer import Observer
from nemorl.observe.run_folder import RunFolder
from nemorl.rollout.collector import Collector
from nemorl.rollout.groups import GroupAssignment, GroupSummary, TrajectorySummary
from nemorl.rollout.order import TaskOrder
from nemorl.rollout.schedule import CollectorPlan, GroupSchedule
from nemorl.rollout.worker import GroupRunner
from nemorl.run.train import rare_collections
from nemorl.session.handles import (
    GenerationReceivers,
    ModelHandle,
    PolicySenders,
)
from nemorl.session.session import Session
from nemorl.session.supervisor import ReplicaSupervisor, RolloutSupervisor
from nemorl.trajectories import StopReason
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import ReceiveReport, ReceiverLayout, SenderLayout, SendReport

SAMPLES = 16  # trajectories of a group
STALENESS = 1
ACTORS = 2  # of each kind
STEP_SECONDS = 100.0  # of which the driver's share is shown
GENERATION_SECONDS = 60.0
SUMS = [f"metric/{number}" for number in range(36)]  # of an update, in addition to those below
MODEL = Path("models/arithmetic")
WEIGHTS = (TensorSlice.whole("weight", (64,)),)  # of every rank: a plan as small as possible
SHOWN = {
    "workers": "workers",
    "trajectories": "trajectories",
    "cpu_seconds": "CPU s",
    "main_thread_seconds": "main thread",
    "share_of_step_percent": "% of 100 s",
    "cpu_milliseconds_per_worker": "ms a worker",
    "megabytes_sent": "MB sent",
    "megabytes_received": "MB received",
    "memory_megabytes": "MB held",
    "lists_read": "lists read",
    "wall_seconds": "s here",
}


class SimulatedRollout(GroupRunner):
    """Answers for rollout workers: every group at once, sampled by the weights in use."""

    def __init__(self, groups_per_step: int, seconds: float) -> None:
        super().__init__()
        self._groups_per_step, self._seconds, self._random = groups_per_step, seconds, Random(0)
        self.router = self

    async def _run_group(self, assignment: GroupAssignment, records: Any) -> GroupSummary:
        step, place = divmod(assignment.group, self._groups_per_step)
        # One step ahead, so that they end during the next one; of the first two steps together.
        steps = min(step, STALENESS) + (place + self._random.random()) / self._groups_per_step
        await asyncio.sleep(self._seconds * steps)
        version = max(0, assignment.group // self._groups_per_step - STALENESS)
        members = (_summary(row, assignment.group, version) for row in range(assignment.num_samples))
        trajectories = [b""] * assignment.num_samples  # in place of them
        return GroupSummary(assignment.group, assignment.task_index, trajectories, tuple(members))

    async def take_metrics(self) -> RouterMetrics:
        return RouterMetrics()

    async def lost_replicas(self) -> dict[str, str]:
        return {}


def _summary(row: int, group: int, version: int) -> TrajectorySummary:
    reward, tokens = (
        float((row + group) % 2),
        min(1900, int(Random(SAMPLES * group + row).lognormvariate(5.5, 0.8))),
    )
    return TrajectorySummary(
        row=row,
        reward=reward,
        rewards={"exact_match": reward},
        num_tokens=tokens + 100,
        num_sampled=tokens,
        num_turns=1,
        stop=StopReason.STOP,
        min_version=version,
        max_version=version,
        error=None,
        seconds_generation=1.0,
        seconds_environment=0.0,
    )


class SimulatedEngine:
    async def health(self) -> EngineHealth:
        return EngineHealth(0, 0, 0, False, 0.0)

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        return (ReceiverLayout(WEIGHTS, ("float32",) * len(WEIGHTS)),)

    async def prepare_refit(self, parts: Any) -> None: ...

    async def receive_weights(self, session: Any) -> tuple[ReceiveReport, ...]:
        return (ReceiveReport({}, 0),)

    async def commit_weights(self, version: int) -> None: ...


class SimulatedRank:
    def __init__(self) -> None:
        self.sender = self

    def describe(self) -> SenderLayout:
        return SenderLayout(WEIGHTS)

    def prepare(self, part: Any) -> None: ...

    def send(self, session: Any) -> SendReport:
        return SendReport({}, 0)

    def load_trajectories(self, shard: Any) -> None:
        self._loaded = len(shard.weights)

    def compute_logprobs(self, micro_batches: Any, **_: Any) -> LogprobStats:
        return LogprobStats(0.0, 0.0, 1)

    def train(self, micro_batches: Any, loss: Any, keep: bool = False) -> TrainStats:
        sums = {"loss/policy": 0.0, "loss/total": 0.0, "entropy": 1.0, "tokens": 1.0}
        sums |= dict.fromkeys(SUMS, 1.0)
        return TrainStats(
            sums, {}, 1.0, 1e-6, skipped=False, empty=False, num_tokens=1, num_distinct=1, num_computed=1
        )

    def record(self, names: Any, folder: Any, step: int) -> tuple[list[Trained], str]:
        return [Trained(1.0, 0.0, 1)] * self._loaded, ""


@dataclass
class Traffic:
    """Bytes of the objects that this process sends and receives, from `count` on."""

    sent: int = 0
    received: int = 0

    def count(self) -> None:
        """Count in Ray's serialization, which has no hook for it."""
        context: Any = SerializationContext
        serialize, deserialize = context.serialize, context._deserialize_object

        def serialized(self_: Any, value: Any) -> Any:
            result = serialize(self_, value)
            self.sent += result.total_bytes
            return result

        def deserialized(self_: Any, data: Any, metadata: Any, *rest: Any) -> Any:
            self.received += (len(data) if data is not None else 0) + len(metadata or b"")
            return deserialize(self_, data, metadata, *rest)

        context.serialize, context._deserialize_object = serialized, deserialized


class CountedGroup(WorkerGroup):
    lists_read = 0  # of trajectories, by all ranks

    def tabulate(self, of_shards: Sequence[Sequence[ray.ObjectRef]]) -> Sequence[Any]:
        self.lists_read += sum(map(len, of_shards))
        return super().tabulate(of_shards)


async def group(
    kind: str, target: str, count: int, *, concurrent: bool, relays: int = ACTORS, **kwargs: Any
) -> CountedGroup:
    """Workers for which a few real processes answer."""

    async def processes(
        number: int, name: str, path: str, *, concurrent: bool, **kwargs: Any
    ) -> list[Worker]:
        made = [
            start_worker(name, rank, OUT / "scale", None, concurrent=concurrent, num_cpus=0)
            for rank in range(number)
        ]
        invocation = Invocation("make", "start", 60.0)
        await asyncio.gather(*(worker.actor.make.remote(invocation, path, **kwargs) for worker in made))
        return made

    answering = await processes(ACTORS, kind, f"scale:{target}", concurrent=concurrent, **kwargs)
    relaying = []
    if count >= MIN_RELAYED:
        relaying = await processes(relays, f"{kind}-relay", "nemorl.cluster.group:Relay", concurrent=True)
    workers = [replace(answering[rank % ACTORS], group=kind, rank=rank) for rank in range(count)]
    return CountedGroup(kind, workers, Mesh(data=count), relays=relaying)


def experiment(groups: int, steps: int) -> Experiment:
    return Experiment.model_validate(
        {
            "run_dir": str(OUT / "scale" / "run"),
            "policy": {
                "model_path": str(MODEL),
                "max_sequence_length": 2048,
                "micro_batch_tokens": 32768,
            },
            "data": {"chat": False, "train": {"name": "arithmetic", "digits": 2, "size": 9000, "seed": 1}},
            "rewards": [{"function": "exact_match"}],
            "algorithm": {
                "name": "grpo",
                "num_steps": steps,
                "num_prompts_per_step": groups,
                "num_generations_per_prompt": SAMPLES,
                "max_staleness": STALENESS,
            },
            "logger": {"console": "plain"},
        }
    )


async def steps_of_a_run(count: int, groups: int, steps: int, seconds: float) -> dict[str, float]:
    """Means over the steps but the first."""
    checked = experiment(groups, steps + 1)
    config, deadlines = checked.algorithm, checked.cluster.deadlines
    assert isinstance(config, OnlineConfig)
    num_ranks, num_rollout = max(1, count // 2), max(1, count // 8)
    relays = -(-num_ranks // FAN_OUT)
    ranks = await group("policy", "SimulatedRank", num_ranks, concurrent=False, relays=relays)
    sampling: dict[str, Any] = {"groups_per_step": groups, "seconds": seconds}
    rollout = await group("rollout", "SimulatedRollout", num_rollout, concurrent=True, **sampling)
    engines = await group(
        "generation", "SimulatedEngine", max(1, count - num_ranks - num_rollout), concurrent=True
    )
    replicas = ReplicaSupervisor(engines, checked.cluster)
    rollouts = RolloutSupervisor(rollout, checked.cluster, lambda: replicas.announced)
    replicas.connect(rollouts)
    exchange = WeightExchange(
        PolicySenders(ranks, 60.0), GenerationReceivers(engines, 60.0), 2**20, 60.0, TransportOptions()
    )
    policy = ModelHandle(ranks, ModelSpec("policy", "policy", checked.policy), checked.cluster)
    session = Session(models={"policy": policy}, rollouts=rollouts, exchange=exchange, replicas=replicas)
    plan = CollectorPlan(groups, SAMPLES, STALENESS, num_steps=steps + 2)
    collector = Collector(
        rollouts.handles, GroupSchedule(TaskOrder(9000, 1, True), plan), deadlines.generation
    )
    update = PolicyGradientUpdate(config, EntropyWeight.of(config.entropy), {"exact_match": 1.0})
    shutil.rmtree(checked.run_dir, ignore_errors=True)
    folder, traffic = RunFolder.create(checked.run_dir, to_yaml(checked)), Traffic()
    traffic.count()
    with Observer(folder, checked.logger, total_steps=steps + 1) as observer, rare_collections():

        async def directly(work: Any) -> Any:
            return await work

        gate = LogprobGate(config, checked.generation)
        algorithm = OnlineAlgorithm(config, session, collector, update, gate, observer, directly)

        async def step(number: int) -> None:
            values = await algorithm.step(number)
            assert values["dropped/too_old"] == values["dropped/aborted"] == 0
            for _ in range(int(STEP_SECONDS / deadlines.health)):
                await replicas.check()
                await rollouts.check()
            observer.step(number, version=number, values=values)

        await session.update_weights(0)
        await step(1)

        def spent() -> tuple[float, ...]:
            clocks = time.monotonic(), time.process_time(), time.thread_time()
            return *clocks, traffic.sent, traffic.received, ranks.lists_read

        before = spent()
        for number in range(2, steps + 2):
            await step(number)
        each = [(b - a) / steps for a, b in zip(before, spent(), strict=True)]
        await collector.close()
        await replicas.close()
    wall, cpu, main_thread, sent, received, lists_read = each
    return {
        "cpu_seconds": cpu,
        "main_thread_seconds": main_thread,
        "wall_seconds": wall,
        "lists_read": lists_read,
        "megabytes_sent": sent / 1e6,
        "megabytes_received": received / 1e6,
    }


def measure(count: int, per_worker: int, steps: int, seconds: float) -> dict[str, Any]:
    """One number of workers, in a process of its own."""
    groups = max(1, count * per_worker // SAMPLES)
    with ClusterRuntime(ClusterConfig(), ()):
        ray.get(ray.put(0))  # the connection is made before memory is measured
        row, _, memory = measured("cpu", lambda: asyncio.run(steps_of_a_run(count, groups, steps, seconds)))
    return {
        "workers": count,
        "trajectories": groups * SAMPLES,
        **row,
        "share_of_step_percent": 100 * row["cpu_seconds"] / STEP_SECONDS,
        "cpu_milliseconds_per_worker": 1000 * row["cpu_seconds"] / count,
        "memory_megabytes": memory.work_bytes / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512, 1024, 2048, 4096])
    parser.add_argument("--trajectories-per-worker", type=int, default=24)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--generation-seconds", type=float, default=GENERATION_SECONDS)
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if not MODEL.exists():
        create = [sys.executable, "-m", "nemorl.cli", "models", "create", "arithmetic", str(MODEL)]
        subprocess.run(create, check=True, stdout=sys.stderr)
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    metrics = {
        "rows": rows,
        "steps": options.steps,
        "step_seconds": STEP_SECONDS,
        "generation_seconds": options.generation_seconds,
    }
    for count in options.workers:
        with ProcessPoolExecutor(1, mp_context=context) as process:
            sizes = count, options.trajectories_per_worker, options.steps, options.generation_seconds
            rows.append(process.submit(measure, *sizes).result())
        # After each, since those of many workers take minutes.
        shown = [{title: row[name] for name, title in SHOWN.items()} for row in rows]
        publish("scale", metrics, table_of("the driver's part of a step", shown))


if __name__ == "__main__":
    main()
