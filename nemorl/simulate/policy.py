"""The other simulated processes of a run: rollout workers with a real router each, and the policy."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from nemorl.algorithms.metrics import versions_of
from nemorl.algorithms.online import Batch
from nemorl.cluster.errors import WorkerDied
from nemorl.config.algorithm import OnlineBase
from nemorl.config.experiment import Experiment
from nemorl.data.losses import LogprobStats, TrainStats
from nemorl.data.shards import SequencePlace
from nemorl.generation.router import Replica, Router, RouterMetrics
from nemorl.generation.types import GenerationRequest, Progress, SamplingParams
from nemorl.rollout.groups import (
    Dropped,
    GroupAssignment,
    GroupSummary,
    TrajectorySummary,
    misses_deadline,
)
from nemorl.rollout.turn_loop import Record, SampleKey
from nemorl.rollout.versions import UNBROKEN, Lineage
from nemorl.rollout.worker import GroupRunner
from nemorl.session.handles import Folder
from nemorl.trajectories import StopReason

from .engines import Scale
from .workload import Workload

_PROGRESS_TOKENS = 64  # the router's own, in tokens
_SAMPLING = SamplingParams()
_CONVERSATION = 2**20  # instead of a turn in the key of draws that belong to no turn
FORWARD_SHARE = 1 / 3  # of the seconds of a pass that trains


class SimulatedRolloutWorker(GroupRunner):
    """Conversations over a router; a task is solved with a probability that is uniform over tasks."""

    def __init__(
        self, experiment: Experiment, workload: Workload, scale: Scale, replicas: Sequence[Replica], seed: int
    ) -> None:
        super().__init__()
        self._workload, self._scale, self._seed = workload, scale, seed
        self._turn_limit = scale.blocks(experiment.generation.max_new_tokens)
        self._limit = scale.blocks(experiment.policy.max_sequence_length)
        self._seconds = experiment.cluster.deadlines.generation
        self._environment_seconds = experiment.cluster.deadlines.environment
        config = experiment.algorithm
        assert isinstance(config, OnlineBase)
        self._group_seconds, self._min_members = config.group_seconds, config.min_members
        self.router = Router(replicas, max(1, _PROGRESS_TOKENS // scale.block), waits=True)

    async def _run_group(
        self, assignment: GroupAssignment, records: Sequence[Record]
    ) -> GroupSummary | Dropped:
        of_task = Random(hash((self._seed, assignment.task_index)))
        prompt, solved = self._scale.blocks(self._workload.prompt_tokens.draw(of_task)), of_task.random()
        samples = (self._run_sample(assignment, n, r, prompt, solved) for n, r in enumerate(records))
        trajectories = tuple(await asyncio.gather(*samples))
        members, greedy = trajectories[: assignment.num_samples], trajectories[assignment.num_samples :]
        if misses_deadline(members, self._min_members):
            return Dropped(assignment.group, "deadline", tuple(record.num_sampled for record in records))
        reference = (assignment.group, assignment.attempt)
        index = assignment.task_index
        return GroupSummary(assignment.group, index, reference, members, greedy=next(iter(greedy), None))

    async def _run_sample(
        self, assignment: GroupAssignment, sample: int, record: Record, prompt: int, solved: float
    ) -> TrajectorySummary:
        key = SampleKey(self._seed, assignment.group, sample, assignment.validation, assignment.attempt)
        random, clock = Random(key.seed(_CONVERSATION)), asyncio.get_running_loop().time
        tokens, newest, stop, turn, block = prompt, -1, StopReason.LENGTH, 0, self._scale.block
        error: str | None = None
        began, environment = clock(), 0.0

        def note(progress: Progress) -> None:
            nonlocal newest
            record.note(progress.versions)
            record.num_unfinished += (block - 1) * len(progress.versions)
            newest = max(newest, int(progress.versions.max(initial=-1)))

        try:
            async with asyncio.timeout(self._group_seconds):
                for turn in range(1, max(1, round(self._workload.turns.draw(random))) + 1):
                    if tokens >= self._limit:
                        break
                    request = GenerationRequest(
                        id=f"{key}/{turn}",
                        prompt=np.zeros(tokens, np.int32),
                        sampling=_SAMPLING,
                        max_new_tokens=min(self._turn_limit, self._limit - tokens),
                        seed=key.seed(turn),
                        deadline_seconds=self._seconds,
                        conversation=str(key),
                    )
                    completion = await self.router.generate(request, note)
                    tokens, stop = tokens + len(completion.tokens), completion.stop
                    if stop in (StopReason.ABORT, StopReason.ERROR):
                        error = f"generation of turn {turn}: ended with `{stop}`"
                        break
                    # That a call fails at its deadline is not simulated.
                    if seconds := min(self._workload.environment.draw(random), self._environment_seconds):
                        await asyncio.sleep(seconds)
                        environment += seconds
                    if stop is StopReason.LENGTH:
                        break
        except TimeoutError:
            stop, error = StopReason.DEADLINE, "not finished within `algorithm.group_seconds`"
        return TrajectorySummary(
            row=sample,
            reward=float(random.random() < solved),
            rewards={},
            num_tokens=prompt * block + record.num_sampled,
            num_sampled=record.num_sampled,
            num_turns=turn,
            stop=stop,
            min_version=-1 if record.oldest_version is None else record.oldest_version,
            max_version=newest,
            error=error,
            seconds_generation=clock() - began - environment,
            seconds_environment=environment,
            trains=error is None,
        )


@dataclass(frozen=True)
class SimulatedRouters:
    """The routers of all rollout workers (`Routers`)."""

    workers: Sequence[SimulatedRolloutWorker]

    async def take_metrics(self, seconds: float) -> list[RouterMetrics]:
        return [worker.router.take_metrics() for worker in self.workers]

    async def lost_replicas(self, seconds: float) -> list[dict[str, str]]:
        return [worker.router.lost_replicas() for worker in self.workers]

    async def add(self, replica: Replica, seconds: float) -> None:
        for worker in self.workers:
            worker.router.add(replica)

    async def remove(self, name: str, seconds: float) -> None:
        for worker in self.workers:
            worker.router.remove(name)

    async def give_up(self, causes: Mapping[str, str], seconds: float) -> None:
        for worker in self.workers:
            worker.router.give_up(causes)


@dataclass
class SimulatedPolicy:
    """A model that trains (`ModelHandle`): every call takes its seconds."""

    workload: Workload
    trains: bool = True
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by activity
    trained_tokens: int = 0
    devices: object = None
    failure: str = ""  # why its process has ended, if it has
    _tokens: list[int] = field(default_factory=list)  # of each minibatch

    async def load(self, sequences: Sequence[SequencePlace], *, kind: str, num_minibatches: int = 1) -> None:
        size = -(-len(sequences) // num_minibatches)
        lengths = [sequence.num_tokens for sequence in sequences]
        self._tokens = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
        await self._spend("loading", self.workload.loading)

    async def logprobs(self, *, old: bool, reference: bool, entropy: bool = False) -> LogprobStats:
        tokens = sum(self._tokens)
        await self._spend("logprobs", (old + reference) * FORWARD_SHARE * tokens * self.workload.training)
        return LogprobStats(gap_mean=0.0, gap_max=0.0, num_tokens=tokens)

    async def train(self, loss: Any, minibatch: int = 0) -> TrainStats:
        tokens = self._tokens[minibatch]
        await self._spend("training", tokens * self.workload.training + self.workload.update)
        self.trained_tokens += tokens
        return TrainStats(
            {}, {}, 1.0, 0.0, skipped=False, empty=False, num_tokens=tokens, num_computed=tokens
        )

    def packing_metrics(self) -> dict[str, float]:
        return {}

    async def onload(self) -> None: ...

    async def release_devices(self) -> None: ...

    def check(self, stage: str) -> None:
        """Raise WorkerDied if its process has ended."""
        if self.failure:
            raise WorkerDied("policy", 0, stage, self.failure, Path("simulated"), ())

    async def lost_one(self) -> bool:
        return bool(self.failure)

    async def restart(self) -> None:
        await asyncio.sleep(self.workload.engine_start)
        self.failure = ""

    async def restore(self, folder: Folder) -> None:
        await self._spend("loading", self.workload.loading)

    async def _spend(self, kind: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.check(kind)
        self.seconds[kind] += seconds


@dataclass
class SimulatedUpdate:
    """Trains on all trajectories without an error (`Update`); counts their tokens by age."""

    config: OnlineBase
    ages: Counter[int] = field(default_factory=Counter)  # tokens by the age of their trajectory

    def prepare(self, groups: Sequence[GroupSummary], number: int, lineage: Lineage = UNBROKEN) -> Batch:
        config, members = self.config, [(g, t) for g in groups for t in g.trajectories if t.trains]
        for _, trajectory in members:
            if trajectory.min_version >= 0:
                age = lineage.age(trajectory.min_version, lineage.version(number - 1))
                self.ages[age] += trajectory.num_sampled
        places = [SequencePlace(g.reference, t.row, t.num_tokens, weight=1.0) for g, t in members]
        parts = getattr(config, "num_minibatches", 1)
        schedule = [*range(parts)] * getattr(config, "num_epochs", 1) if members else []
        loss: Any = None  # which a simulated model does not compute
        return Batch(
            places,
            versions_of(groups),
            {"policy": loss},
            schedule=schedule,
            num_updates=len(schedule),
            num_minibatches=parts,
            needs_reference=getattr(config, "keeps_reference", False),
            needs_old_logprobs=getattr(config, "needs_old_logprobs", False),
        )

    def metrics(self, updates: Sequence[TrainStats]) -> dict[str, float]:
        return {}


@dataclass
class SimulatedStage:
    shares: dict[str, float] = field(default_factory=dict)

    def advance(self, count: int = 1, *, tokens: int = 0) -> None: ...

    def share(self, name: str, fraction: float) -> None:
        self.shares[name] = fraction


@dataclass
class SimulatedObserver:
    """Adds up the virtual seconds of stages (`Observer`)."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def stage(self, name: str, **_: Any) -> Iterator[SimulatedStage]:
        clock = asyncio.get_running_loop().time
        stage, began = SimulatedStage(), clock()
        try:
            yield stage
        finally:
            passed, shared = clock() - began, sum(stage.shares.values())
            self.seconds[name] += passed * (1 - shared)
            for part, fraction in stage.shares.items():
                self.seconds[part] += passed * fraction

    def samples(self, samples: Sequence[Any]) -> None: ...
