"""The simulated policy, and what the loop does around it: batches without a loss, and times of stages."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nemorl.algorithms.metrics import versions_of
from nemorl.algorithms.online import Batch
from nemorl.config.algorithm import OnlineBase
from nemorl.data.losses import LogprobStats, TrainStats
from nemorl.data.shards import SequencePlace
from nemorl.rollout.groups import GroupSummary
from nemorl.rollout.versions import UNBROKEN, Lineage
from nemorl.session.handles import Folder

from .processes import died
from .workload import Workload

FORWARD_SHARE = 1 / 3  # of the seconds of a pass that trains


@dataclass
class SimulatedPolicy:
    """A model that trains (`ModelHandle`): every call takes its seconds."""

    workload: Workload
    trains: bool = True
    has_lost_node: bool = False
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

    async def logprobs(
        self, *, old: bool, reference: bool, entropy: bool = False, collision: bool = False
    ) -> LogprobStats:
        tokens = sum(self._tokens)
        await self._spend("logprobs", (old + reference) * FORWARD_SHARE * tokens * self.workload.training)
        return LogprobStats(gap_mean=0.0, gap_max=0.0, num_tokens=tokens)

    async def train(self, loss: Any, minibatch: int = 0, *, keep: bool = False) -> TrainStats:
        tokens = self._tokens[minibatch]
        await self._spend("training", tokens * self.workload.training + self.workload.update)
        self.trained_tokens += tokens
        return TrainStats(
            {},
            {},
            1.0,
            0.0,
            skipped=False,
            empty=False,
            num_tokens=tokens,
            num_distinct=tokens,
            num_computed=tokens,
        )

    def packing_metrics(self) -> dict[str, float]:
        return {}

    async def onload(self) -> None: ...

    async def release_devices(self) -> None: ...

    def check(self, stage: str) -> None:
        """Raise WorkerDied if its process has ended."""
        if self.failure:
            raise died("policy", self.failure, stage=stage)

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

    def trajectories(self, rows: Sequence[Any]) -> None: ...
