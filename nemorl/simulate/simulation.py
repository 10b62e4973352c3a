"""A run of the real loop in virtual time: `OnlineAlgorithm` over a `Session` of simulated processes.

What decides about groups, requests, processes and versions is the code of real runs: schedule, collector,
dispatcher, routers, supervisors, control of concurrency and the step. What takes time is simulated. An event
loop whose clock jumps to the next event runs both, so that hours of 4,096 GPUs take seconds, and the same
seed gives the same run.
"""

import asyncio
import selectors
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from nemorl.algorithms.filters import refill
from nemorl.algorithms.metrics import LogprobGate
from nemorl.algorithms.online import OnlineAlgorithm
from nemorl.config.algorithm import OnlineBase
from nemorl.config.experiment import Experiment
from nemorl.errors import RunError
from nemorl.rollout.collector import Collector
from nemorl.rollout.concurrency import ConcurrencyControl
from nemorl.rollout.groups import DropReason, GroupSummary
from nemorl.rollout.order import TaskOrder
from nemorl.rollout.schedule import CollectorPlan, DataPlace, GroupSchedule
from nemorl.rollout.versions import UNBROKEN, Lineage
from nemorl.session.session import Session
from nemorl.session.supervisor import ReplicaSupervisor, RolloutSupervisor

from .engines import SimulatedEngines, SimulatedExchange
from .policy import SimulatedObserver, SimulatedPolicy, SimulatedUpdate
from .processes import Faults
from .rollout import SimulatedRollouts
from .workload import Workload

T = TypeVar("T")
_TASKS = 10**9  # more than a simulation samples


class Deadlock(RunError):
    """Everything waits for something that no event will bring."""


class _Selector(selectors.DefaultSelector):
    """Passes the time of a wait instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise Deadlock("the simulation waits, and nothing is scheduled")
        if not ready:
            self.now += max(0.0, timeout or 0.0)
        return ready


# looptime, a package for this, runs 42 empty iterations before it moves the clock, rounds times to
# microseconds, and waits in real time where nothing is scheduled.
class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock begins at 0 and jumps to the next timer. Raises Deadlock if there is none."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass(frozen=True)
class Snapshot:
    """What was counted until a time."""

    seconds: float
    tokens: int
    generated: int
    sampling: float  # the seconds of a trajectory in engines, added up over steps
    policy: Mapping[str, float]
    refit: float
    engines: Mapping[str, float]
    stages: Mapping[str, float]
    ages: Counter[int]
    dropped: Counter[str]


@dataclass
class Simulation:
    """A run between two steps."""

    algorithm: OnlineAlgorithm
    schedule: GroupSchedule
    session: Session
    engines: SimulatedEngines
    policy: SimulatedPolicy
    exchange: SimulatedExchange
    update: SimulatedUpdate
    observer: SimulatedObserver
    generated: int = 0  # tokens in the batches of all steps
    sampling: float = 0.0  # the mean seconds of a trajectory in engines, added up over steps
    dropped: Counter[str] = field(default_factory=Counter)  # groups by reason, and `tokens`

    async def step(self) -> dict[str, float]:
        metrics = await self.algorithm.step(self.schedule.steps_taken + 1)
        self.generated += int(metrics["tokens/generated"])
        self.sampling += metrics["trajectory_seconds/generation"]
        for name in (*get_args(DropReason), "given_up", "tokens"):
            self.dropped[name] += int(metrics.get(f"dropped/{name}", 0))
        return metrics

    def snapshot(self) -> Snapshot:
        self.engines.settle()
        return Snapshot(
            seconds=asyncio.get_running_loop().time(),
            tokens=self.policy.trained_tokens,
            generated=self.generated,
            sampling=self.sampling,
            policy=dict(self.policy.seconds),
            refit=self.exchange.seconds,
            engines=dict(vars(self.engines.usage)),
            stages=dict(self.observer.seconds),
            ages=Counter(self.update.ages),
            dropped=Counter(self.dropped),
        )


@asynccontextmanager
async def open_simulation(
    experiment: Experiment,
    workload: Workload,
    seed: int,
    *,
    done: int = 0,
    place: DataPlace | None = None,
    num_steps: int | None = None,
    lineage: Lineage = UNBROKEN,
    start: int = 0,
) -> AsyncIterator[Simulation]:
    """A run that has `done` steps and is at `place` in its data; without `num_steps` it has no last step.

    `start` is the number of earlier starts of the run: processes fail at other times than in those.
    """
    config, generation, cluster = experiment.algorithm, experiment.generation, experiment.cluster
    assert isinstance(config, OnlineBase)
    max_sequences = getattr(generation, generation.batch_field)
    of_engines = Faults(workload.engine_failures, workload.engine_start, (seed, start))
    of_workers = Faults(workload.worker_failures, workload.worker_start, (seed, start, -1))
    engines = SimulatedEngines(generation.replicas, workload, max_sequences, of_engines)
    replicas = ReplicaSupervisor(engines, cluster, shares_devices=generation.shares_devices)
    group = SimulatedRollouts(experiment, workload, engines.scale, replicas.announced, seed, of_workers)
    rollouts = RolloutSupervisor(group, cluster, lambda: replicas.announced)
    workers, health = rollouts.handles, replicas.health
    control = ConcurrencyControl.of(generation, lambda: len(workers), health, rollouts.set_concurrency)
    replicas.connect(rollouts)
    replicas.start_watch()
    rollouts.start_watch()
    if control is not None:
        control.start()
    policy: Any = SimulatedPolicy(workload)
    exchange: Any = SimulatedExchange(engines, generation.on_update, cluster.deadlines.refit, policy.check)
    models = {"policy": policy}
    session = Session(models, rollouts=rollouts, exchange=exchange, replicas=replicas, concurrency=control)
    session.lineage = lineage
    plan = CollectorPlan(
        groups_per_step=config.num_prompts_per_step,
        samples_per_group=config.num_generations_per_prompt,
        max_staleness=config.max_staleness,
        num_steps=num_steps,
        greedy_baseline=config.greedy_baseline,
        extra_groups=config.extra_groups,
        trains_discarded=config.corrects_age,
    )
    order = TaskOrder(_TASKS, seed, shuffle=False)
    replacing = refill(config.filters, config.num_prompts_per_step)
    schedule = GroupSchedule(order, plan, done, place or DataPlace(), replacing, lineage=lineage)
    collector = Collector(workers, schedule, cluster.deadlines.generation)
    update, observer, gate = SimulatedUpdate(config), SimulatedObserver(), LogprobGate(config, generation)
    observed: Any = observer
    algorithm = OnlineAlgorithm(config, session, collector, update, gate, observed, _uncancelled)
    try:
        if generation.can_scale:
            await replicas.scale(generation.max_replicas or generation.replicas)
        await session.update_weights(done)
        yield Simulation(algorithm, schedule, session, engines, policy, exchange, update, observer)
    finally:
        await collector.close()
        if control is not None:
            await control.close()
        await rollouts.close()
        await replicas.close()


async def _uncancelled(work: Coroutine[Any, Any, list[GroupSummary]]) -> list[GroupSummary]:
    return await work


@dataclass(frozen=True)
class Prediction:
    """Means over the measured steps of a simulated run."""

    steps: int
    step_seconds: float
    trained_per_second: float  # tokens
    generated_per_second: float
    shares: Mapping[str, Mapping[str, float]]  # of the time, by group of processes and what it does
    sequences: float  # that an engine decodes together while it decodes
    stages: Mapping[str, float]  # seconds of a step
    sampling: float  # seconds of a trajectory in engines, waiting included
    ages: Mapping[int, float]  # share of the sampled tokens by the age of their trajectory
    dropped: Mapping[str, float]  # of a step
    lost_engines: int

    @property
    def bottleneck(self) -> str:
        """The group of processes that idles least."""
        return min(self.shares, key=lambda group: self.shares[group]["idle"])


def predict(experiment: Experiment, workload: Workload, seed: int, num_steps: int) -> Prediction:
    """Simulate steps, of which the first are not measured. Raises RunError where the run would end by it."""
    return run_in_virtual_time(_predict(experiment, workload, seed, num_steps))


async def _predict(experiment: Experiment, workload: Workload, seed: int, num_steps: int) -> Prediction:
    staleness = getattr(experiment.algorithm, "max_staleness", 0)
    async with open_simulation(experiment, workload, seed) as simulation:
        for _ in range(staleness + 1):  # until as much is in flight as may be
            await simulation.step()
        before = simulation.snapshot()
        for _ in range(num_steps):
            await simulation.step()
        after = simulation.snapshot()
        assert simulation.session.replicas is not None
        return _between(before, after, num_steps, experiment, len(simulation.session.replicas.losses))


def _between(
    before: Snapshot, after: Snapshot, steps: int, experiment: Experiment, lost_engines: int
) -> Prediction:
    seconds = after.seconds - before.seconds
    policy = {name: value / seconds for name, value in _less(after.policy, before.policy).items()}
    policy["refit"] = (after.refit - before.refit) / seconds
    policy["idle"] = max(0.0, 1 - sum(policy.values()))
    engines, config = _less(after.engines, before.engines), experiment.generation
    capacity = seconds * (config.max_replicas or config.replicas)
    generation = {"decoding": engines["decoding"] / capacity, "paused": engines["paused"] / capacity}
    generation["lost"] = max(0.0, 1 - engines["alive"] / capacity)
    generation["idle"] = max(0.0, 1 - sum(generation.values()))
    ages = after.ages - before.ages
    return Prediction(
        steps=steps,
        step_seconds=seconds / steps,
        trained_per_second=(after.tokens - before.tokens) / seconds,
        generated_per_second=(after.generated - before.generated) / seconds,
        shares={"policy": policy, "generation": generation},
        sequences=engines["sequences"] / max(engines["decoding"], 1e-9),
        sampling=(after.sampling - before.sampling) / steps,
        stages={name: value / steps for name, value in _less(after.stages, before.stages).items()},
        ages={age: count / ages.total() for age, count in sorted(ages.items())},
        dropped={name: value / steps for name, value in _less(after.dropped, before.dropped).items()},
        lost_engines=lost_engines,
    )


def _less(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items()}
