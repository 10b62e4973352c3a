"""The driver's side of sampling: gives groups to rollout workers and hands them out, step by step."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence, Set
from dataclasses import replace
from heapq import heapify, heapreplace
from typing import Any, Protocol

from nemorl.errors import RunError

from .groups import Dropped, GroupAssignment, GroupSummary
from .schedule import MAX_ATTEMPTS, DataPlace, GroupSchedule
from .versions import Lineage

OnFinished = Callable[[int], None]  # receives how many more groups have finished


class RolloutProcess(Protocol):
    """A rollout worker, as the driver sees it. One that is lost may return."""

    @property
    def is_up(self) -> bool: ...

    def run_groups(self, assignments: list[GroupAssignment], /) -> AsyncIterator[GroupSummary | Dropped]: ...

    async def abort_stale(self, oldest: int, /) -> None:
        """Drop the training groups with a token of weights older than version `oldest`."""

    async def abort_groups(self, groups: list[int], /) -> None:
        """Drop these training groups, as cut off, as far as they run."""


class RolloutFailed(RunError):
    """Groups that will not come; the message names them and their workers."""


class SamplingStalled(RolloutFailed):
    """No group finished within the deadline."""


def ignore(finished: int) -> None:
    """For a caller that does not count them."""


class Dispatcher:
    """Spreads groups over rollout workers, evenly by those still to finish. Belongs to one event loop."""

    def __init__(self, workers: Sequence[RolloutProcess], seconds: float) -> None:
        """`seconds` limits the wait for one more group."""
        self._workers = workers
        self.seconds = seconds
        # Groups still to finish, each with the oldest version that can have sampled a token of it.
        self._waiting: defaultdict[RolloutProcess, dict[int, int]] = defaultdict(dict)
        self._outcomes: asyncio.Queue[GroupSummary | Dropped | Exception] = asyncio.Queue()
        self._calls: set[asyncio.Task[None]] = set()

    def start(self, assignments: Sequence[GroupAssignment], version: int = 0) -> None:
        """Begin to sample these groups with the weights of `version` or newer.

        Without a worker that is up they wait for those that return.
        """
        if not assignments:
            return
        workers = [worker for worker in self._workers if worker.is_up] or self._workers
        shares: defaultdict[RolloutProcess, list[GroupAssignment]] = defaultdict(list)
        least = [(len(self._waiting[worker]), number) for number, worker in enumerate(workers)]
        heapify(least)
        for assignment in assignments:
            count, number = least[0]
            shares[workers[number]].append(assignment)
            self._waiting[workers[number]][assignment.group] = version
            heapreplace(least, (count + 1, number))
        for worker, share in shares.items():
            self._keep(self._follow(worker, share))

    async def next(self) -> GroupSummary | Dropped:
        """The next group to end. Raises what a worker raises, and RolloutFailed when one ends early."""
        outcome = await self._outcomes.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def abort_stale(self, oldest: int) -> None:
        """Have the workers drop what runs and is too old; they do it meanwhile."""
        for worker, waiting in self._waiting.items():
            if any(version < oldest for version in waiting.values()):
                self._keep(worker.abort_stale(oldest))

    def abort_groups(self, groups: Set[int]) -> None:
        """Have the workers drop these groups; they do it meanwhile."""
        for worker, waiting in self._waiting.items():
            if ended := sorted(waiting.keys() & groups):
                self._keep(worker.abort_groups(ended))

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def queues(self) -> dict[str, float]:
        """Groups that each worker still has to finish."""
        return {f"worker {n}": float(len(self._waiting[w])) for n, w in enumerate(self._workers)}

    def stalled(self, ready: int, count: int) -> SamplingStalled:
        """The error for a wait that was too long."""
        held = [
            f"worker {number}{'' if worker.is_up else ' (lost)'}: groups {_ids(sorted(ids))}"
            for number, worker in enumerate(self._workers)
            if (ids := self._waiting[worker])
        ]
        return SamplingStalled(
            f"sampling: no group finished within {self.seconds:g} s (`cluster.deadlines.generation`), with "
            f"{ready} of {count} ready; waiting for {'; '.join(held) or 'no group: too few were started'}"
        )

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        call = asyncio.create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _follow(self, worker: RolloutProcess, share: list[GroupAssignment]) -> None:
        left = {assignment.group for assignment in share}  # another call may have one of them again
        try:
            async for outcome in worker.run_groups(share):
                left.remove(outcome.group)
                self._waiting[worker].pop(outcome.group, None)
                self._outcomes.put_nowait(outcome)
            if left:
                number = self._workers.index(worker)
                raise RolloutFailed(f"rollout worker {number} ended without groups {_ids(sorted(left))}")
        except Exception as error:  # noqa: BLE001  raised by `next`
            self._outcomes.put_nowait(error)


def _ids(groups: Sequence[int]) -> str:
    shown = ", ".join(map(str, groups[:8]))
    return f"{shown} and {len(groups) - 8} more" if len(groups) > 8 else shown


class Collector:
    """Keeps as many groups under way as the schedule allows. Belongs to one event loop."""

    def __init__(self, workers: Sequence[RolloutProcess], schedule: GroupSchedule, seconds: float) -> None:
        """`seconds` limits the wait for one more group."""
        self._dispatcher = Dispatcher(workers, seconds)
        self._schedule = schedule
        self._collecting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._progress_at = 0.0  # when a group finished, or a step began to wait

    @property
    def place(self) -> DataPlace:
        return self._schedule.resume_place

    def queues(self) -> dict[str, float]:
        """Groups running, ready for a step, and to be finished by each worker."""
        counts = {"running": float(len(self._schedule.running)), "ready": float(self._schedule.num_ready)}
        return counts | self._dispatcher.queues()

    def take_dropped(self) -> tuple[list[Dropped], int]:
        """What was dropped since the last call, and the number of groups that were given up."""
        dropped, given_up = self._schedule.dropped, len(self._schedule.given_up)
        self._schedule.dropped, self._schedule.given_up = [], []
        return dropped, given_up

    def take_order_metrics(self) -> dict[str, float]:
        """What the order of tasks did since the last call."""
        return self._schedule.order.take_metrics()

    def rewind(self, step: int, place: DataPlace, lineage: Lineage) -> None:
        """Continue from an earlier step between two steps, as `GroupSchedule.rewind`."""
        self._schedule.rewind(step, place, lineage)

    def advance(self, version: int) -> None:
        """Generation has weights of `version` now, counted in steps of the run: start what this allows."""
        self._schedule.advance(version)
        self._dispatcher.abort_stale(self._schedule.oldest_version)
        self._start()
        if self._collecting is None:
            self._collecting = asyncio.create_task(self._collect())

    async def next_batch(self, on_finished: OnFinished = ignore) -> list[GroupSummary]:
        """The groups of the next step, as `GroupSchedule.take`; `on_finished` counts those that train.

        Returns when what it cuts off has ended: with `max_staleness` 0 nothing runs between steps. Raises
        what a worker raises, and RolloutFailed when one ends early or the deadline passes.
        """
        count, reported = self._schedule.plan.groups_per_step, 0
        self._progress_at = asyncio.get_running_loop().time()
        while True:
            ready = min(self._schedule.num_ready, count)
            if ready > reported:
                on_finished(ready - reported)
                reported = ready
            if (batch := self._schedule.take()) is not None:
                break
            self._start()  # in place of what was too old
            await self._change(ready)
        self._dispatcher.abort_groups(self._schedule.cut_off)
        while self._schedule.cut_off:
            await self._change(count)
        return batch

    async def close(self) -> None:
        if self._collecting is not None:
            self._collecting.cancel()
            await asyncio.gather(self._collecting, return_exceptions=True)
        await self._dispatcher.close()

    def _start(self) -> None:
        self._dispatcher.start(self._schedule.start(), self._schedule.version)

    async def _change(self, ready: int) -> None:
        """Wait until a group ends; the deadline is for one that finishes. `ready` is for the error."""
        assert self._collecting is not None, "nothing was started: call advance first"
        self._changed.clear()
        if self._collecting.done():
            self._collecting.result()
        try:
            async with asyncio.timeout_at(self._progress_at + self._dispatcher.seconds):
                await self._changed.wait()
        except TimeoutError:
            raise self._dispatcher.stalled(ready, self._schedule.plan.groups_per_step) from None

    async def _collect(self) -> None:
        """Follow the groups as they end, also while a step trains.

        Raises RolloutFailed if as many groups have failed in a row as all attempts at those of a step are;
        and SamplingStalled if ten times as many have missed their deadline.
        """
        in_a_row, most_failed = Counter[str](), MAX_ATTEMPTS * self._schedule.plan.groups_per_step
        most_late = 10 * most_failed
        try:
            while True:
                outcome = await self._dispatcher.next()
                if isinstance(outcome, Dropped):
                    self._schedule.drop(outcome)
                    in_a_row[outcome.reason] += 1
                    if in_a_row["failed"] == most_failed:
                        why = (
                            "an environment or a reward failed (on_error: drop_group); see logs/rollout-*.log"
                        )
                        raise RolloutFailed(f"{most_failed} groups in a row were dropped, since {why}")
                    if in_a_row["deadline"] == most_late:
                        fix = "raise algorithm.group_seconds, or remove it"
                        raise SamplingStalled(f"{most_late} groups in a row missed their deadline: {fix}")
                else:
                    in_a_row.clear()
                    self._schedule.finish(outcome)
                    self._progress_at = asyncio.get_running_loop().time()
                self._start()
                self._changed.set()
        finally:
            self._changed.set()  # `next_batch` raises what ended this


async def sample_validation(
    workers: Sequence[RolloutProcess],
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
    assignments = [
        GroupAssignment(task, task, samples_per_task, True, of_set, num_texts=int(task < num_texts))
        for task in range(num_tasks)
    ]
    dispatcher.start(assignments)
    groups: list[GroupSummary] = []
    try:
        while len(groups) < num_tasks:
            try:
                async with asyncio.timeout(seconds):
                    outcome = await dispatcher.next()
            except TimeoutError:
                raise dispatcher.stalled(len(groups), num_tasks) from None
            if isinstance(outcome, Dropped):  # with its worker: weights do not change, so nothing is too old
                task = outcome.group
                assignments[task] = replace(assignments[task], attempt=assignments[task].attempt + 1)
                dispatcher.start([assignments[task]])
                continue
            groups.append(outcome)
            on_finished(1)
    finally:
        await dispatcher.close()
    return sorted(groups, key=lambda group: group.group)
