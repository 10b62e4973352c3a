"""The driver's side of sampling: assignments and summaries of groups, which may start, and the next batch.

Synchronous, one-step-off and fully asynchronous training differ in one number. The batch of step `s` is
trained by weights of version `s`; a group may start as soon as it will not be older than `max_staleness`
versions when its batch is trained:

    groups that may have started  =  (version + max_staleness + 1) * groups_per_step

Where groups can be refused, as dynamic sampling does, another starts in place of each: a synchronous step
gets the shortest run of the data that holds enough groups, whatever the order in which they finish. Driver
and rollout workers exchange metadata, never token arrays.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from nemorl.errors import RunError
from nemorl.rewards.scored import ScoringMetrics
from nemorl.trajectories import Conversation, StopReason, Trajectory


@dataclass(frozen=True)
class GroupAssignment:
    group: int  # unique among training groups of a run, and among validation groups of one validation
    task_index: int  # in the training or the validation dataset
    num_samples: int
    validation: bool = False
    validation_set: str = ""  # of `data.validation_sets`; empty: `data.validation`
    num_texts: int = 0  # samples of which the summary carries the text
    greedy_baseline: bool = False  # one sample more, at temperature 0, which is scored and does not train


@dataclass(frozen=True)
class TrajectorySummary:
    row: int  # place in the list behind the group's reference
    reward: float  # the weighted sum
    rewards: dict[str, float]  # by name, before weights; absent = not applicable
    num_tokens: int
    num_sampled: int  # tokens of the policy; after an error too, where none of them trains
    num_turns: int
    stop: StopReason
    min_version: int  # oldest weights that sampled a token; -1 when none was sampled
    max_version: int
    error: str | None
    seconds_generation: float
    seconds_environment: float
    turn_rewards: tuple[float, ...] = ()  # of each turn, weighted; the environment's alone
    answer: str | None = None  # canonical final answer; in validations with votes
    trains: bool = True  # False after an error, or where a filter takes it out


@dataclass(frozen=True)
class SampleText:
    row: int
    prompt: str
    completion: str
    answer: str | None = None  # what the task expects


@dataclass(frozen=True)
class GroupSummary:
    group: int
    task_index: int
    reference: Any  # what `store` gave for its list of trajectories
    trajectories: tuple[TrajectorySummary, ...]
    texts: tuple[SampleText, ...] = ()
    greedy: TrajectorySummary | None = None  # the additional greedy sample; not in the list
    scoring: Mapping[str, ScoringMetrics] = field(default_factory=dict)  # by reward, of those computed


def summarize(trajectory: Trajectory, row: int) -> TrajectorySummary:
    sampled = trajectory.versions[trajectory.versions >= 0]
    return TrajectorySummary(
        row=row,
        reward=trajectory.reward,
        rewards=trajectory.rewards,
        num_tokens=trajectory.num_tokens,
        num_sampled=trajectory.num_sampled,
        num_turns=len(trajectory.turns),
        stop=trajectory.stop,
        min_version=int(sampled.min()) if len(sampled) else -1,
        max_version=int(sampled.max()) if len(sampled) else -1,
        error=trajectory.error,
        seconds_generation=trajectory.seconds_generation,
        seconds_environment=trajectory.seconds_environment,
        turn_rewards=tuple(turn.reward for turn in trajectory.turns),
        trains=trajectory.error is None,
    )


_MAX_LENGTH = 200  # characters that go to the driver; of longer answers their hash


async def last_answer(conversation: Conversation, environments: object) -> str | None:
    """The answer in the policy's last message, as the environment's factory reads it, else the whole message.

    A factory reads answers if it has `async answer_in(text)`, which returns the same text for equal answers
    and None without one. None after an error, and where nothing is said.
    """
    if conversation.trajectory.error is not None:
        return None
    said = (message.content for message in reversed(conversation.exchange) if message.role == "assistant")
    answer: str | None = next(said, "")
    if (read := getattr(environments, "answer_in", None)) is not None:
        answer = await read(answer)
    answer = " ".join((answer or "").split())
    return hashlib.sha256(answer.encode()).hexdigest() if len(answer) > _MAX_LENGTH else answer or None


RunGroups = Callable[[list[GroupAssignment]], AsyncIterator[GroupSummary]]
OnFinished = Callable[[int], None]  # receives how many more groups have finished


class RolloutFailed(RunError):
    """Groups that will not come; the message names them and their workers."""


def ignore(finished: int) -> None: ...


class Dispatcher:
    """Spreads groups over rollout workers, evenly by those still to finish. Belongs to one event loop."""

    def __init__(self, workers: Sequence[RunGroups], seconds: float) -> None:
        self._workers = list(workers)
        self._seconds = seconds
        self._waiting: list[set[int]] = [set() for _ in workers]  # groups each worker still has to finish
        self._finished: list[GroupSummary] = []  # in the order of finishing
        self._calls: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    def start(self, assignments: Iterable[GroupAssignment]) -> None:
        """Begin to sample these groups: one call for each worker that gets some."""
        shares: list[list[GroupAssignment]] = [[] for _ in self._workers]
        for assignment in assignments:
            worker = min(range(len(self._workers)), key=lambda w: len(self._waiting[w]))
            shares[worker].append(assignment)
            self._waiting[worker].add(assignment.group)
        for worker, share in enumerate(shares):
            if share:
                call = asyncio.create_task(self._follow(worker, share))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def take(self, count: int, on_finished: OnFinished = ignore) -> list[GroupSummary]:
        """The first `count` finished groups not taken yet, in the order of their ids.

        `on_finished` receives the number of groups finished since its last call. Raises what a worker raises,
        and RolloutFailed when one ends early or the deadline passes.
        """
        reported = 0
        try:
            async with asyncio.timeout(self._seconds) as timeout:
                while reported < count:
                    while len(self._finished) <= reported:
                        if self._failure is not None:
                            raise self._failure
                        self._changed.clear()
                        await self._changed.wait()
                    finished = min(len(self._finished), count)
                    on_finished(finished - reported)
                    reported = finished
        except TimeoutError as error:
            if not timeout.expired():  # a worker's own
                raise
            late = (f"worker {w}: groups {_ids(sorted(ids))}" for w, ids in enumerate(self._waiting) if ids)
            raise RolloutFailed(
                f"sampling: {len(self._finished)} of {count} groups finished within {self._seconds:g} s "
                "(`cluster.deadlines.generation`); waiting for "
                f"{'; '.join(late) or 'no group: too few were started'}"
            ) from error
        taken, self._finished = self._finished[:count], self._finished[count:]
        return sorted(taken, key=lambda summary: summary.group)

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _follow(self, worker: int, share: list[GroupAssignment]) -> None:
        try:
            async for summary in self._workers[worker](share):
                self._waiting[worker].discard(summary.group)
                self._finished.append(summary)
                self._changed.set()
            if missing := sorted(self._waiting[worker] & {assignment.group for assignment in share}):
                self._failure = RolloutFailed(f"rollout worker {worker} ended without groups {_ids(missing)}")
        except Exception as error:  # noqa: BLE001  raised by `take`
            self._failure = error
        self._changed.set()


def _ids(groups: Sequence[int]) -> str:
    shown = ", ".join(map(str, groups[:8]))
    return f"{shown} and {len(groups) - 8} more" if len(groups) > 8 else shown


class TaskOrder:
    """Task index of every global position 0, 1, 2, …; each epoch visits every task once. It has no state."""

    def __init__(self, num_tasks: int, seed: int, shuffle: bool) -> None:
        if num_tasks < 1:
            raise ValueError("an order needs at least one task")
        self._num_tasks, self._shuffle = num_tasks, shuffle
        # A step rarely touches more than two epochs, and a permutation may be large.
        self._permutation = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(num_tasks)
        )

    def task_index(self, position: int) -> int:
        epoch, place = divmod(position, self._num_tasks)
        return int(self._permutation(epoch)[place]) if self._shuffle else place


@dataclass(frozen=True)
class CollectorPlan:
    """The sizes of sampling, from the `algorithm` and `logger` sections."""

    groups_per_step: int
    samples_per_group: int
    max_staleness: int
    texts_per_step: int = 0  # samples of a step whose text is kept, spread over its groups
    num_steps: int | None = None  # of the run; nothing is sampled for steps beyond; None: no end
    greedy_baseline: bool = False  # a greedy sample in addition to each group


@dataclass(frozen=True)
class Refill:
    """Groups of a step that are refused, and how many others may be sampled in their place."""

    accepts: Callable[[GroupSummary], bool]  # a pure function of the group
    max_groups: int  # sampled for one step, the refused ones included; at least `groups_per_step`


class Collector:
    """Keeps as many groups under way as staleness allows. Belongs to one event loop."""

    def __init__(
        self,
        workers: Sequence[RunGroups],
        order: TaskOrder,
        plan: CollectorPlan,
        seconds: float,
        position: int = 0,
        version: int = 0,
        refill: Refill | None = None,
    ) -> None:
        """`seconds` bounds `next_batch`, or with `refill` the wait for each group."""
        self._dispatcher = Dispatcher(workers, seconds)
        self._order, self._plan, self._refill = order, plan, refill
        self._replaced = 0  # groups started in place of refused ones
        self._first_position, self._first_version = position, version
        self._started = position  # groups started since the run began; the id of the next one
        # The place in the data, for a checkpoint: every group before it has been handed out. With staleness,
        # groups beyond it may have been handed out too; a resumed run samples those again.
        self.position = position
        self._handed_out: set[int] = set()  # ids above the position

    def advance(self, version: int) -> None:
        """Generation has weights of `version` now, counted in steps of the run: start what this allows."""
        plan = self._plan
        steps = version + plan.max_staleness + 1
        ahead = min(steps, plan.num_steps or steps) - self._first_version
        self._start_up_to(self._first_position + ahead * plan.groups_per_step + self._replaced)

    async def next_batch(self, on_finished: OnFinished = ignore) -> list[GroupSummary]:
        """The groups of the next step, ordered by id: the first that finished, without staleness all started.

        With `refill` the refused groups are among them; `on_finished` counts only the others. Raises like
        `Dispatcher.take`.
        """
        if self._refill is None:
            batch = await self._dispatcher.take(self._plan.groups_per_step, on_finished)
        else:
            batch = await self._refilled(self._refill, on_finished)
        self._handed_out.update(summary.group for summary in batch)
        while self.position in self._handed_out:
            self._handed_out.remove(self.position)
            self.position += 1
        return batch

    async def _refilled(self, refill: Refill, on_accepted: OnFinished) -> list[GroupSummary]:
        """Groups until enough are accepted or the most have been sampled, ordered by id."""
        batch: list[GroupSummary] = []
        accepted, started = 0, self._plan.groups_per_step
        while accepted < self._plan.groups_per_step and len(batch) < refill.max_groups:
            (group,) = await self._dispatcher.take(1)
            batch.append(group)
            if refill.accepts(group):
                accepted += 1
                on_accepted(1)
            elif started < refill.max_groups:
                started += 1
                self._replaced += 1
                self._start_up_to(self._started + 1)
        return sorted(batch, key=lambda summary: summary.group)

    def _start_up_to(self, end: int) -> None:
        plan, groups = self._plan, range(self._started, max(end, self._started))
        each, rest = divmod(plan.texts_per_step, plan.groups_per_step)
        self._dispatcher.start(
            GroupAssignment(
                group,
                self._order.task_index(group),
                plan.samples_per_group,
                num_texts=min(each + (group % plan.groups_per_step < rest), plan.samples_per_group),
                greedy_baseline=plan.greedy_baseline,
            )
            for group in groups
        )
        self._started = groups.stop

    async def close(self) -> None:
        await self._dispatcher.close()


async def sample_validation(
    workers: Sequence[RunGroups],
    num_tasks: int,
    samples_per_task: int,
    seconds: float,
    num_texts: int = 0,
    on_finished: OnFinished = ignore,
    of_set: str = "",
) -> list[GroupSummary]:
    """Sample validation tasks, in order; the first `num_texts` come with a text. Raises like `take`."""
    dispatcher = Dispatcher(workers, seconds)
    dispatcher.start(  # seeds depend on the task alone, so two validations differ only by the weights
        GroupAssignment(task, task, samples_per_task, True, of_set, num_texts=int(task < num_texts))
        for task in range(num_tasks)
    )
    try:
        return await dispatcher.take(num_tasks, on_finished)
    finally:
        await dispatcher.close()
