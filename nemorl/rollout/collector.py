"""The driver's side of sampling: which groups may start, and the batch that trains next.

Synchronous, one-step-off and fully asynchronous training differ in one number. The batch of step `s` is
trained by weights of version `s`; a group may start as soon as it will not be older than `max_staleness`
versions when its batch's turn comes:

    groups that may have started  =  (version + max_staleness + 1) * groups_per_step

Where groups can be refused, as dynamic sampling does, another starts in place of each: a synchronous step
gets the shortest run of the data that holds enough groups, whatever the order in which they finish.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemorl.data.datasets import TaskOrder

from .dispatch import Dispatcher, OnFinished, RunGroups, ignore
from .groups import GroupAssignment, GroupSummary


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
        """`seconds` bounds `next_batch`; a checkpoint left the data at `position` after `version` steps.

        With `refill` it bounds the wait for each group.
        """
        self._dispatcher = Dispatcher(workers, seconds)
        self._order = order
        self._plan = plan
        self._refill = refill
        self._replaced = 0  # groups started in place of refused ones
        self._first_position, self._first_version = position, version
        self._started = position  # groups started since the run began; the id of the next one
        self._position = position
        self._handed_out: set[int] = set()  # ids above the position

    @property
    def position(self) -> int:
        """The place in the data, for a checkpoint: every group before it has been handed out.

        With staleness, groups beyond it may have been handed out too; a resumed run samples those again.
        """
        return self._position

    def advance(self, version: int) -> None:
        """Generation has weights of `version` now, counted in steps of the run: start what this allows."""
        plan = self._plan
        steps = version + plan.max_staleness + 1
        ahead = min(steps, plan.num_steps or steps) - self._first_version
        self._start_up_to(self._first_position + ahead * plan.groups_per_step + self._replaced)

    async def next_batch(self, on_finished: OnFinished = ignore) -> list[GroupSummary]:
        """The groups of the next step, ordered by id: without staleness exactly those started for it, else
        the first that finished. `on_finished` receives the number that finished since its last call.

        With `refill` the refused groups are among them, so that there may be more than a step trains, and
        fewer that are accepted; `on_finished` counts only those. Raises what a worker raises, and
        RolloutFailed when one ends early or the deadline passes.
        """
        if self._refill is None:
            batch = await self._dispatcher.take(self._plan.groups_per_step, on_finished)
        else:
            batch = await self._refilled(self._refill, on_finished)
        self._handed_out.update(summary.group for summary in batch)
        while self._position in self._handed_out:
            self._handed_out.remove(self._position)
            self._position += 1
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
        groups = range(self._started, max(end, self._started))
        self._dispatcher.start([self._assignment(group) for group in groups])
        self._started = groups.stop

    async def close(self) -> None:
        """Give up what is still under way."""
        await self._dispatcher.close()

    def _assignment(self, group: int) -> GroupAssignment:
        plan = self._plan
        each, rest = divmod(plan.texts_per_step, plan.groups_per_step)
        texts = each + (group % plan.groups_per_step < rest)
        return GroupAssignment(
            group,
            self._order.task_index(group),
            plan.samples_per_group,
            num_texts=min(texts, plan.samples_per_group),
            greedy_baseline=plan.greedy_baseline,
        )


async def sample_validation(
    workers: Sequence[RunGroups],
    num_tasks: int,
    samples_per_task: int,
    seconds: float,
    num_texts: int = 0,
    on_finished: OnFinished = ignore,
    of_set: str = "",
) -> list[GroupSummary]:
    """Sample the first `num_tasks` validation tasks, in order; `num_texts` of them come with a text.

    Seeds depend on the task alone, so two validations differ only by the weights. Raises like `next_batch`.
    """
    dispatcher = Dispatcher(workers, seconds)
    dispatcher.start(
        [
            GroupAssignment(
                task,
                task,
                samples_per_task,
                validation=True,
                validation_set=of_set,
                num_texts=int(task < num_texts),
            )
            for task in range(num_tasks)
        ]
    )
    try:
        return await dispatcher.take(num_tasks, on_finished)
    finally:
        await dispatcher.close()
