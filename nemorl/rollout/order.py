"""Which task each group samples: the order of a run's tasks, by its position 0, 1, 2, …

    sources ─▶ stages of pools ─▶ base order ─▶ [skip by pass rate] ─▶ [replay of hard tasks] ─▶ task

Epochs, shares of sources and curricula are pure functions of the position. What depends on measured pass
rates is drawn once for each position, when its group starts for the first time, and recorded: with
`max_staleness` above 0 the order in which groups finish is not reproducible.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np

from nemorl.config.data import CurriculumStageConfig, DataConfig, ReplayConfig, TaskSamplingConfig

from .groups import GroupSummary


@dataclass(frozen=True)
class Feedback:
    """What an order by pass rates needs to continue, in addition to the seed."""

    cursor: int = 0  # next position of the base order
    drawn: tuple[tuple[int, int], ...] = ()  # (position, task) of groups that started and are not handed out
    rates: tuple[
        tuple[int, float, int, int], ...
    ] = ()  # (task, pass rate, position of the group, skips since)

    @classmethod
    def parse(
        cls, cursor: int, drawn: Iterable[tuple[int, int]], rates: Iterable[tuple[int, float, int, int]]
    ) -> "Feedback":
        """From the lists of a JSON file."""
        return cls(
            cursor, tuple((at, task) for at, task in drawn), tuple((t, r, p, s) for t, r, p, s in rates)
        )


class Order(Protocol):
    def task_index(self, position: int) -> int:
        """The task of a group; the same at every call. First calls are in the order of positions."""

    def hand_out(self, positions: Iterable[int], groups: Iterable[GroupSummary] = ()) -> None:
        """Groups at these positions are not sampled again; `groups` are those of them with results."""

    def reopen(self, positions: Iterable[int]) -> None:
        """Groups at these positions, which were handed out, are sampled again, with the same tasks."""

    @property
    def feedback(self) -> Feedback | None:
        """None of an order that is a function of the position."""

    def restore(self, feedback: Feedback | None) -> None:
        """Continue with the feedback of a checkpoint."""

    def take_metrics(self) -> dict[str, float]:
        """Of the tasks that were drawn since the last call."""


class TaskOrder(Order):
    """Each epoch visits every task once. It needs no state of its own."""

    def __init__(
        self, num_tasks: int, seed: int | Sequence[int], shuffle: bool, window: int | None = None
    ) -> None:
        """`window`: tasks that are shuffled among each other, in parts of an epoch; None: all of them."""
        if num_tasks < 1:
            raise ValueError("an order needs at least one task")
        self._num_tasks, self._shuffle, self._window = num_tasks, shuffle, window or num_tasks
        key = (seed,) if isinstance(seed, int) else tuple(seed)
        # A step rarely touches more than two epochs, and a permutation may be large.
        self._permutation = lru_cache(maxsize=2)(
            lambda part, size: np.random.default_rng((*key, *part)).permutation(size)
        )

    def task_index(self, position: int) -> int:
        epoch, place = divmod(position, self._num_tasks)
        if not self._shuffle:
            return place
        if self._window >= self._num_tasks:
            return int(self._permutation((epoch,), self._num_tasks)[place])
        part, inside = divmod(place, self._window)
        start = part * self._window
        size = min(self._window, self._num_tasks - start)
        return start + int(self._permutation((epoch, part), size)[inside])

    def hand_out(self, positions: Iterable[int], groups: Iterable[GroupSummary] = ()) -> None:
        return

    def reopen(self, positions: Iterable[int]) -> None:
        return

    @property
    def feedback(self) -> Feedback | None:
        return None

    def restore(self, feedback: Feedback | None) -> None:
        return

    def take_metrics(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Pool:
    """Tasks of one source that a stage draws from, in shuffled epochs."""

    tasks: Sequence[int]
    weight: float = 1.0  # shares of the pools are proportional to it
    max_epochs: int | None = None  # after which it is left out; None: no limit
    window: int | None = None  # see `TaskOrder`


@dataclass(frozen=True)
class Stage:
    pools: Sequence[Pool]
    positions: int | None = None  # None: to the end of the run


class StagedOrder(TaskOrder):
    """Stages of pools. Every prefix of a stage has the shares of its pools, up to one group for each pool."""

    def __init__(self, stages: Sequence[Stage], seed: int, shuffle: bool) -> None:
        if not stages or not all(any(pool.max_epochs is None for pool in stage.pools) for stage in stages):
            raise ValueError("a stage needs a pool without an end")
        self._stages = [_StageOrder(stage, (seed, number), shuffle) for number, stage in enumerate(stages)]
        self._starts = [0, *accumulate(stage.positions or 0 for stage in stages[:-1])]

    def task_index(self, position: int) -> int:
        stage = bisect_right(self._starts, position) - 1
        return self._stages[stage].task_index(position - self._starts[stage])


class _StageOrder:
    def __init__(self, stage: Stage, key: tuple[int, int], shuffle: bool) -> None:
        self._pools = [pool for pool in stage.pools if len(pool.tasks)]
        self._orders = [
            TaskOrder(len(pool.tasks), (*key, number), shuffle, pool.window)
            for number, pool in enumerate(self._pools)
        ]
        self._left = [
            pool.max_epochs * len(pool.tasks) if pool.max_epochs is not None else None for pool in self._pools
        ]
        self._drawn: list[tuple[int, int]] = []  # of each position its pool and the place in the pool's order
        self._counts = [0] * len(self._pools)
        self._due = [0.0] * len(self._pools)

    def task_index(self, position: int) -> int:
        while len(self._drawn) <= position:
            self._draw()
        pool, place = self._drawn[position]
        return int(self._pools[pool].tasks[self._orders[pool].task_index(place)])

    def _draw(self) -> None:
        """The pool that is furthest behind its share is next."""
        open_ = [pool for pool, left in enumerate(self._left) if left is None or self._counts[pool] < left]
        total = sum(self._pools[pool].weight for pool in open_)
        for pool in open_:
            self._due[pool] += self._pools[pool].weight / total
        chosen = max(open_, key=lambda pool: self._due[pool])
        self._due[chosen] -= 1
        self._drawn.append((chosen, self._counts[chosen]))
        self._counts[chosen] += 1


@dataclass
class _Rate:
    rate: float
    position: int  # of the group that measured it
    skips: int = 0  # since then


class PassRateOrder(Order):
    """Follows a base order, skips by pass rate, and puts replays of hard tasks between.

    Each position of the base order is skipped or given to one group: none is lost or comes twice, whatever is
    dropped, rewound or resumed. Replays are in addition. A task is not replayed while a group of it is open.
    """

    def __init__(self, base: Order, sampling: TaskSamplingConfig, seed: int) -> None:
        self._base, self._sampling, self._seed = base, sampling, seed
        self._cursor = 0
        self._open: dict[int, int] = {}  # position -> task, of groups that are not handed out
        self._closed: dict[int, int] = {}  # the same of those that are
        self._rates: dict[int, _Rate] = {}
        self._num_skipped = self._num_replayed = 0  # since the last metrics

    def task_index(self, position: int) -> int:
        if position in self._closed:
            return self._closed[position]
        if position not in self._open:
            self._open[position] = self._draw(position)
        return self._open[position]

    def hand_out(self, positions: Iterable[int], groups: Iterable[GroupSummary] = ()) -> None:
        for position in positions:
            if position in self._open:
                self._closed[position] = self._open.pop(position)
        for group in groups:
            passed = [t.reward >= self._sampling.pass_reward for t in group.trajectories if t.error is None]
            known = self._rates.get(group.task_index)
            # After a restart earlier groups come again; what followed them is already drawn.
            if passed and (known is None or group.group >= known.position):
                skips = known.skips if known is not None and group.group == known.position else 0
                self._rates[group.task_index] = _Rate(sum(passed) / len(passed), group.group, skips)

    def reopen(self, positions: Iterable[int]) -> None:
        for position in positions:
            if position in self._closed:
                self._open[position] = self._closed.pop(position)

    @property
    def feedback(self) -> Feedback:
        known = ((task, self._rates[task]) for task in sorted(self._rates))
        rates = tuple((task, one.rate, one.position, one.skips) for task, one in known)
        return Feedback(self._cursor, tuple(sorted(self._open.items())), rates)

    def restore(self, feedback: Feedback | None) -> None:
        if feedback is not None:
            self._cursor, self._open = feedback.cursor, dict(feedback.drawn)
            self._rates = {task: _Rate(rate, at, skips) for task, rate, at, skips in feedback.rates}

    def take_metrics(self) -> dict[str, float]:
        skipped, self._num_skipped = self._num_skipped, 0
        replayed, self._num_replayed = self._num_replayed, 0
        return {"sampling/skipped": float(skipped), "sampling/replayed": float(replayed)}

    def _draw(self, position: int) -> int:
        random = np.random.default_rng((self._seed, position))
        replay, window = self._sampling.replay, self._sampling.pass_rate
        if replay is not None and random.random() < replay.share:
            replayed = self._replay(random, replay)
            if replayed is not None:
                self._num_replayed += 1
                return replayed
        while True:
            task = self._base.task_index(self._cursor)
            self._cursor += 1
            known = self._rates.get(task)
            if known is None or window is None or window.min <= known.rate <= window.max:
                return task
            if known.skips == window.max_skips:
                known.skips = 0
                return task
            known.skips += 1
            self._num_skipped += 1

    def _replay(self, random: np.random.Generator, replay: ReplayConfig) -> int | None:
        taken = set(self._open.values())
        hard = [
            (task, (1 - self._rates[task].rate) ** replay.exponent)
            for task in sorted(self._rates)
            if self._rates[task].rate <= replay.max_pass_rate and task not in taken
        ]
        weights = np.array([weight for _, weight in hard])
        if not weights.sum():
            return None
        return hard[int(random.choice(len(hard), p=weights / weights.sum()))][0]


def order_of(
    data: DataConfig, sizes: Sequence[int], seed: int, groups_per_step: int, levels: Sequence[float] = ()
) -> Order:
    """The order of a run; tasks are numbered over all sources.

    `sizes`: tasks of each source. `levels`: of each task the value of the curriculum's key, if there is one.
    """
    sources, curriculum = list(data.sources.values()), data.sampling.curriculum
    starts = [0, *accumulate(sizes)]
    windows = [stream.window if (stream := getattr(s.dataset, "stream", None)) else None for s in sources]
    temperature = getattr(data.train, "temperature", 1.0)
    if len(sources) == 1 and sources[0].max_epochs is None and curriculum is None:
        base = TaskOrder(sizes[0], seed, data.shuffle, windows[0])
    else:
        pools = []
        for source, start, size, window in zip(sources, starts, sizes, windows, strict=False):
            weight = (source.weight or size) ** (1 / temperature)
            pools.append(Pool(range(start, start + size), weight, source.max_epochs, window))
        stages = [
            Stage([_admitted(pool, stage, levels) for pool in pools], stage.steps * groups_per_step)
            for stage in (curriculum.stages if curriculum is not None else ())
        ]
        base = StagedOrder([*stages, Stage(pools)], seed, data.shuffle)
    return PassRateOrder(base, data.sampling, seed) if data.sampling.by_pass_rate else base


def _admitted(pool: Pool, stage: CurriculumStageConfig, levels: Sequence[float]) -> Pool:
    return replace(pool, tasks=[task for task in pool.tasks if stage.admits(levels[task])], max_epochs=None)
