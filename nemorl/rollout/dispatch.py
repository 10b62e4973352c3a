"""Handing groups to rollout workers and taking them back as they finish."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from nemorl.errors import RunError

from .groups import GroupAssignment, GroupSummary

RunGroups = Callable[[list[GroupAssignment]], AsyncIterator[GroupSummary]]
OnFinished = Callable[[int], None]  # receives how many more groups have finished


class RolloutFailed(RunError):
    """Groups that will not come; the message names them and their workers."""


def ignore(finished: int) -> None:
    """For a caller that does not count them."""


class Dispatcher:
    """Spreads groups over rollout workers, evenly by those still to finish. Belongs to one event loop."""

    def __init__(self, workers: Sequence[RunGroups], seconds: float) -> None:
        """`workers`: each takes assignments and yields summaries as they finish. `seconds` bounds `take`."""
        self._workers = list(workers)
        self._seconds = seconds
        self._waiting: list[set[int]] = [set() for _ in workers]  # groups each worker still has to finish
        self._finished: list[GroupSummary] = []  # in the order of finishing
        self._calls: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    def start(self, assignments: Sequence[GroupAssignment]) -> None:
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
                call.add_done_callback(partial(self._end, worker, share))

    async def take(self, count: int, on_finished: OnFinished = ignore) -> list[GroupSummary]:
        """The first `count` finished groups not taken yet, in the order of their ids.

        `on_finished` receives the number of groups finished since its last call. Raises what a worker raises,
        and RolloutFailed when one ends early or the deadline passes.
        """
        reported = 0
        try:
            async with asyncio.timeout(self._seconds) as timeout:
                while reported < count:
                    await self._more_than(reported)
                    finished = min(len(self._finished), count)
                    on_finished(finished - reported)
                    reported = finished
        except TimeoutError as error:
            if not timeout.expired():  # a worker's own
                raise
            raise self._stalled(count) from error
        taken, self._finished = self._finished[:count], self._finished[count:]
        return sorted(taken, key=lambda summary: summary.group)

    async def _more_than(self, count: int) -> None:
        """Return when more than `count` groups have finished."""
        while len(self._finished) <= count:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Stop following calls that are still running."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _follow(self, worker: int, share: list[GroupAssignment]) -> None:
        async for summary in self._workers[worker](share):
            self._waiting[worker].discard(summary.group)
            self._finished.append(summary)
            self._changed.set()

    def _end(self, worker: int, share: list[GroupAssignment], call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        missing = sorted(self._waiting[worker] & {assignment.group for assignment in share})
        if call.cancelled() or (call.exception() is None and not missing):
            return
        early = RolloutFailed(f"rollout worker {worker} ended without groups {_ids(missing)}")
        self._failure = call.exception() or early
        self._changed.set()

    def _stalled(self, count: int) -> RolloutFailed:
        waiting = "; ".join(
            f"worker {w}: groups {_ids(sorted(groups))}" for w, groups in enumerate(self._waiting) if groups
        )
        return RolloutFailed(
            f"sampling: {len(self._finished)} of {count} groups finished within {self._seconds:g} s "
            f"(`cluster.deadlines.generation`); waiting for {waiting or 'no group: too few were started'}"
        )


def _ids(groups: Sequence[int]) -> str:
    shown = ", ".join(map(str, groups[:8]))
    return f"{shown} and {len(groups) - 8} more" if len(groups) > 8 else shown
