"""Engines that are started again, and how often."""

import asyncio
import logging
from collections import Counter

from nemorl.cluster.errors import ClusterError
from nemorl.cluster.group import Worker, WorkerGroup

logger = logging.getLogger(__name__)

# Of one replica in a run, whether they succeed or not: what dies more often has a cause that starting it
# again does not mend.
MOST_RESTARTS = 3


class Restarts:
    """Starts lost engines of a group again. Belongs to one event loop."""

    def __init__(self, group: WorkerGroup, *, start_seconds: float, pause_seconds: float) -> None:
        """`pause_seconds` lie between an attempt that failed and the next."""
        self._group = group
        self._start_seconds = start_seconds
        self._pause_seconds = pause_seconds
        self._attempts: Counter[int] = Counter()  # of each rank
        self._tasks: list[asyncio.Task[Worker | None]] = []
        self._open = asyncio.Event()  # engines may be started
        self._open.set()
        self._starting = 0
        self._quiet = asyncio.Event()  # none is being started
        self._quiet.set()
        self.num_failed = 0  # attempts

    @property
    def expected(self) -> bool:
        """Whether an engine may still come."""
        return bool(self._tasks)

    @property
    def ready(self) -> list[Worker]:
        """Engines that have started and were not taken."""
        done = [task for task in self._tasks if task.done()]
        return [worker for task in done if (worker := task.result()) is not None]

    def begin(self, rank: int) -> None:
        """Start this replica again, unless that was done too often."""
        if self._attempts[rank] < MOST_RESTARTS:
            self._tasks.append(asyncio.create_task(self._restart(rank)))

    def take(self) -> list[Worker]:
        """`ready`, each once."""
        ready = self.ready
        self._tasks = [task for task in self._tasks if not task.done()]
        return ready

    def forget(self, worker: Worker) -> None:
        """Do not count on one of `ready` that was lost again."""
        self._tasks = [task for task in self._tasks if not (task.done() and task.result() is worker)]

    def allow(self) -> None:
        """Let engines be started from now on: their devices are free."""
        self._open.set()

    async def forbid(self) -> None:
        """Start none from now on; return when those that are being started have, or have failed."""
        self._open.clear()
        await self._quiet.wait()

    async def close(self) -> None:
        """End what is being started."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _restart(self, rank: int) -> Worker | None:
        while True:
            await self._open.wait()
            self._attempts[rank] += 1
            try:
                return await self._start(rank)
            except ClusterError as error:
                self.num_failed += 1
                left = MOST_RESTARTS - self._attempts[rank]
                logger.warning(
                    "generation replica %d could not be started again (attempts left: %d): %s",
                    rank,
                    left,
                    error,
                )
                if not left:
                    return None
            await asyncio.sleep(self._pause_seconds)

    async def _start(self, rank: int) -> Worker:
        self._starting += 1
        self._quiet.clear()
        try:
            return await self._group.restart_async(rank, self._start_seconds)
        finally:
            self._starting -= 1
            if not self._starting:
                self._quiet.set()
