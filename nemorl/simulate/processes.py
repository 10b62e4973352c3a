"""Simulated processes behind real groups: they answer calls, end, hang and start again, in virtual time."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from inspect import isawaitable
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

from nemorl.cluster.errors import DeadlineExceeded, WorkerDied
from nemorl.cluster.group import Mesh, WorkerGroup
from nemorl.cluster.worker import Worker

HANG_SHARE = 0.25  # of the failures; the others end the process


class SimulatedProcess(ABC):
    """Belongs to one event loop, which it leaves when it ends or hangs."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[str] = loop.create_future()  # why it ended
        self.halted: asyncio.Future[None] = loop.create_future()  # it ended, or hangs
        self.sent: set[asyncio.Task[Any]] = set()  # calls without an answer

    def fail(self, cause: str, *, hangs: bool = False) -> None:
        """End the process; or let it answer nothing any more, until it is ended."""
        if self.failure.done():
            return
        if not self.halted.done():
            self._halt()
            self.halted.set_result(None)
        if not hangs:
            self.failure.set_result(cause)

    @abstractmethod
    def _halt(self) -> None:
        """Stop to work."""


class SimulatedWorker(Worker):
    """The handle of a process; `actor` is the process."""

    async def call(self, method: str, *args: Any, stage: str, seconds: float) -> Any:
        process: SimulatedProcess = self.actor
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        if not process.halted.done():
            answer = attrgetter(method)(process)(*args)
            if not isawaitable(answer):
                return answer
            work = asyncio.ensure_future(answer)
            try:
                await _wait({work, process.halted}, end)
                if work.done():
                    return work.result()
            finally:
                work.cancel()
        if not process.failure.done():
            await _wait({process.failure}, end)
        if process.failure.done():
            raise died(self.group, process.failure.result(), self.rank, stage)
        raise DeadlineExceeded(self.group, (self.rank,), stage, seconds, ("it hangs",))

    async def stream(self, method: str, *args: Any, stage: str, seconds: float) -> AsyncGenerator[Any, None]:
        process: SimulatedProcess = self.actor
        if process.failure.done():
            raise died(self.group, process.failure.result(), self.rank, stage)
        async with aclosing(getattr(process, method)(*args)) as items:
            async for item in items:
                yield item

    async def call_pair(
        self, method: str, *args: Any, stage: str, seconds: float, num_awaited: int = 1
    ) -> tuple[Any, Any]:
        answer: tuple[Any, Any] = await self.call(method, *args, stage=stage, seconds=seconds)
        return answer

    def send(self, method: str, *args: Any, stage: str) -> None:
        process: SimulatedProcess = self.actor
        if not process.halted.done():
            task = asyncio.ensure_future(attrgetter(method)(process)(*args))
            process.sent.add(task)
            task.add_done_callback(process.sent.discard)

    async def ended(self) -> None:
        await asyncio.wait({self.actor.failure})


async def _wait(futures: set[asyncio.Future[Any]], end: float) -> None:
    """Until one of them is done, or that time."""
    left = None if end == math.inf else max(0.0, end - asyncio.get_running_loop().time())
    await asyncio.wait(futures, timeout=left, return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True)
class Faults:
    """When the processes of a group fail, and how long it takes to start one."""

    period_seconds: float  # on average between failures of one process
    start_seconds: float
    seed: tuple[int, ...]


P = TypeVar("P", bound=SimulatedProcess)


class SimulatedGroup(WorkerGroup, ABC, Generic[P]):
    """Processes that fail at random; the real group decides who takes part in calls."""

    def __init__(self, name: str, size: int, faults: Faults) -> None:
        self._faults = faults
        self.started: list[P] = []  # all that there were
        super().__init__(name, [self._start(name, rank) for rank in range(size)], Mesh(data=size))

    @abstractmethod
    def _make(self, rank: int) -> P: ...

    def kill(self, *workers: Worker) -> None:
        for worker in workers:
            worker.actor.fail("the driver ended its process and reports the reason")

    async def restart(self, rank: int, deadline_seconds: float) -> Worker:
        await asyncio.sleep(self._faults.start_seconds)
        return self._start(self.name, rank)

    def _start(self, name: str, rank: int) -> SimulatedWorker:
        random = Random(hash((*self._faults.seed, rank, len(self.started))))
        process = self._make(rank)
        self.started.append(process)
        if self._faults.period_seconds < math.inf:
            hangs = random.random() < HANG_SHARE
            asyncio.get_running_loop().call_later(
                random.expovariate(1 / self._faults.period_seconds),
                lambda: process.fail("the process vanished", hangs=hangs),
            )
        return SimulatedWorker(name, rank, Path("simulated"), process)


def died(group: str, cause: str, rank: int = 0, stage: str = "generation") -> WorkerDied:
    return WorkerDied(group, rank, stage, cause, Path("simulated"), ())
