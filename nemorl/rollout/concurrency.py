"""How many trajectories are sampled at a time: the places of a rollout worker, and what sets their number.

Too few leave engines idle. Too many wait in the queues of engines, are slower, and so older when they are
trained on. The number therefore follows what engines report: a little more as long as trajectories wait for a
place, a fifth less when requests wait in engines or groups become too old (additive increase, multiplicative
decrease: Chiu and Jain 1989, "Analysis of the increase and decrease algorithms for congestion avoidance").
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from nemorl.generation.types import EngineHealth

if TYPE_CHECKING:
    from nemorl.config.generation import GenerationBase

MAX_QUEUED = 0.1  # share of their time in an engine that requests may wait
DECREASE = 0.8
PERIOD_SECONDS = 1.0  # between two observations


@dataclass(frozen=True)
class PlacesUse:
    in_use: int
    num_waiting: int  # trajectories without a place
    num_stale: int = 0  # groups that were ended for their age since the last report


class Places:
    """A semaphore whose size may change; first come, first served. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit, self._in_use = limit, 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @classmethod
    def of_worker(cls, generation: "GenerationBase", num_workers: int) -> "Places | None":
        """Those of one of the rollout workers when it starts; None without a limit."""
        if (per_engine := generation.initial_concurrency) is None:
            return None
        return cls(share_of_worker(per_engine * generation.replicas, num_workers))

    @property
    def use(self) -> PlacesUse:
        return PlacesUse(self._in_use, sum(not turn.done() for turn in self._waiting))

    def resize(self, limit: int) -> None:
        """What is beyond a smaller limit keeps its places."""
        self._limit = limit
        self._admit()

    async def __aenter__(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        if not turn.done():  # else without a suspension
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it was admitted at the same time
                    await self.__aexit__()
                raise

    async def __aexit__(self, *_: object) -> None:
        self._in_use -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._in_use < self._limit:
            turn = self._waiting.popleft()
            if not turn.done():  # by a cancellation
                self._in_use += 1
                turn.set_result(None)


@dataclass
class ConcurrencyLimit:
    """Trajectories per engine, adapted to what is observed of all engines and all rollout workers."""

    value: int
    increase: int = 0  # of an observation; 0 keeps the value

    @classmethod
    def of(cls, initial: int, *, adaptive: bool) -> "ConcurrencyLimit":
        return cls(initial, max(1, initial // 16) if adaptive else 0)

    def observe(self, engines: Sequence[EngineHealth], workers: Sequence[PlacesUse]) -> None:
        """Take the state of at least one engine."""
        if not self.increase:
            return
        serving = [engine for engine in engines if not engine.paused]  # in others all that arrives waits
        if queued_share(serving) > MAX_QUEUED or any(use.num_stale for use in workers):
            total, in_use = self.value * len(engines), sum(use.in_use for use in workers)
            # The last trajectories of a step may wait too, but not because they are too many.
            too_many = in_use >= DECREASE * total
            too_many |= sum(engine.queued for engine in serving) > MAX_QUEUED * total
            # The last decrease has an effect only after trajectories have ended.
            if too_many and in_use <= total + len(workers):
                self.value = max(1, int(DECREASE * self.value))
        elif len(serving) == len(engines) and any(use.num_waiting for use in workers):
            self.value += self.increase


def share_of_worker(num_trajectories: int, num_workers: int) -> int:
    return max(1, math.ceil(num_trajectories / num_workers))


def queued_share(engines: Sequence[EngineHealth]) -> float:
    """Share of requests in a queue, which by Little's law is that of their time which they wait there."""
    requests = sum(engine.running + engine.waiting for engine in engines)
    return sum(engine.queued for engine in engines) / requests if requests else 0.0


@dataclass
class ConcurrencyControl:
    """Distributes a limit over rollout workers and adapts it. Belongs to one event loop."""

    limit: ConcurrencyLimit
    num_workers: Callable[[], int]
    health: Callable[[], Awaitable[Sequence[EngineHealth]]]  # of the engines that answer
    # Sets the number of trajectories that each worker samples at a time.
    set_concurrency: Callable[[int], Awaitable[Sequence[PlacesUse]]]

    @classmethod
    def of(
        cls,
        generation: "GenerationBase",
        num_workers: Callable[[], int],
        health: Callable[[], Awaitable[Sequence[EngineHealth]]],
        set_concurrency: Callable[[int], Awaitable[Sequence[PlacesUse]]],
    ) -> "ConcurrencyControl | None":
        """None without a limit."""
        if (initial := generation.initial_concurrency) is None:
            return None
        limit = ConcurrencyLimit.of(initial, adaptive=generation.adaptive_concurrency)
        return cls(limit, num_workers, health, set_concurrency)

    def __post_init__(self) -> None:
        # Of each observation since the metrics were taken: trajectories per engine, and the share of a queue.
        self._in_flight: list[float] = []
        self._queued: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        async def observe_periodically() -> None:
            while True:
                await asyncio.sleep(PERIOD_SECONDS)
                await self.observe()

        self._task = asyncio.create_task(observe_periodically())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def observe(self) -> None:
        """Adapt the limit to what engines and workers report; those that do not answer have no part in it."""
        engines = await self.health()
        if not engines:
            return
        share = share_of_worker(self.limit.value * len(engines), self.num_workers())
        workers = await self.set_concurrency(share)
        self._in_flight.append(sum(use.in_use for use in workers) / len(engines))
        self._queued.append(queued_share(engines))
        self.limit.observe(engines, workers)

    def take_metrics(self) -> dict[str, float]:
        """The limit, and means over the observations since the last call, if any. Raises what ended them."""
        if self._task is not None and self._task.done():
            self._task.result()
        in_flight, self._in_flight = self._in_flight, []
        queued, self._queued = self._queued, []
        metrics = {"generation/concurrency": float(self.limit.value)}
        if in_flight:
            metrics |= {"generation/in_flight": fmean(in_flight), "generation/queued": fmean(queued)}
        return metrics
