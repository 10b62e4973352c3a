"""The engines of a run while some may be lost: who answers, why others do not, and who comes back."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from nemorl.cluster.errors import ClusterError, WorkerFailed
from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.worker import Worker
from nemorl.config.run import DeadlineConfig
from nemorl.generation.errors import EngineFailed, NoReplicaLeft
from nemorl.generation.router import RouterFigures
from nemorl.generation.types import EngineHealth, EngineStats

logger = logging.getLogger(__name__)

# Of one replica in a run: what dies more often has a cause that starting it again does not mend.
MOST_RESTARTS = 3
_ENGINE_FAILED = f"{EngineFailed.__module__}.{EngineFailed.__qualname__}"


class Routers(Protocol):
    """Some routers: a `WorkerGroup` whose workers have one each, or what answers like it."""

    async def call_async(self, method: str, *args: Any, stage: str, deadline_seconds: float) -> list[Any]:
        """`take_router_figures()`, `lost_replicas()` and `add_engine(worker)`."""
        ...


def hanging(health: EngineHealth, step_seconds: float) -> str | None:
    """Why an engine that answers is lost nevertheless; None if it is not."""
    at_work = health.running + health.waiting > 0 and not health.paused
    if not at_work or health.seconds_since_step <= step_seconds:
        return None
    return (
        f"no step for {health.seconds_since_step:.0f} s, while {health.running} sequences run and "
        f"{health.waiting} wait (cluster.deadlines.engine_step is {step_seconds:g})"
    )


class GenerationPool:
    """Watches the engines, gives up those that died or hang, and starts them again.

    A lost engine's process is ended, which the routers see at once: its requests go on elsewhere. One that
    was started again has the weights of the model's folder, so it takes part when the next refit has reached
    it, or at once while generation still samples with those. Belongs to one event loop.
    """

    def __init__(self, group: WorkerGroup, deadlines: DeadlineConfig) -> None:
        self.group = group
        self._deadlines = deadlines
        self._routers: list[Routers] = []
        self._layout_changed: Callable[[], None] = _nothing
        self._lock = asyncio.Lock()  # held while the engines must not change
        self._losses: list[tuple[str, str]] = []  # replica and cause
        self._own_weights = True  # engines sample with those they loaded, so that a new one may join at once
        self._restarts: Counter[int] = Counter()  # of each rank
        self._num_restarted = 0
        self._unannounced: set[int] = set()  # ranks that routers do not know to be back
        self._coming: list[asyncio.Task[Worker | None]] = []
        self._watch: asyncio.Task[None] | None = None

    @property
    def losses(self) -> tuple[tuple[str, str], ...]:
        """Each loss so far: the replica's name and the cause."""
        return tuple(self._losses)

    @property
    def hopeless(self) -> bool:
        """Whether no engine answers, and none is coming."""
        return not self.group.workers and not self._coming

    def serve(self, routers: Routers) -> None:
        """Tell these routers of engines that come back."""
        self._routers.append(routers)

    def on_change(self, layout_changed: Callable[[], None]) -> None:
        """Call this when engines left or came."""
        self._layout_changed = layout_changed

    def start_watch(self) -> None:
        """Check the engines' health from now on."""
        self._watch = asyncio.create_task(self._watch_on())

    def check_watch(self) -> None:
        """Raise what ended the watch, which has no other end."""
        if self._watch is not None and self._watch.done():
            self._watch.result()

    async def close(self) -> None:
        """End the watch and what was being started."""
        tasks = [*self._coming, *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check(self) -> int:
        """Ask every engine how it is; the number of those that were given up for their answer."""
        async with self._lock:
            lost = await self._check()
            if self._own_weights:
                await self._announce(self._admit())
            return lost

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Inside, engines that share their devices have them; they come asleep after it."""
        await self._call("wake", ())
        try:
            yield
        finally:
            await self._call("sleep", 1)

    async def _call(self, method: str, argument: object) -> None:
        """Call a method of the engines that are left."""
        async with self._lock:
            await self._check()
            self._some_left()
            await self.group.call_async(
                method,
                argument,
                stage=f"engines {method}",
                deadline_seconds=self._deadlines.refit,
                ends_group=False,
            )

    @asynccontextmanager
    async def refitting(self) -> AsyncIterator[None]:
        """Around a refit: no engine leaves or comes but by `lost_in_refit`, and those that were started again
        take part. Raises NoReplicaLeft.
        """
        async with self._lock:
            self.check_watch()
            await self._check()
            came = self._admit()
            self._some_left()
            self._own_weights = False
            yield
            # the refit may have lost some of them again
            await self._announce([worker for worker in came if worker in self.group.workers])

    async def lost_in_refit(self) -> bool:
        """Inside `refitting`, when the refit failed: whether engines were lost, so that it may go on without.

        Raises NoReplicaLeft.
        """
        lost = await self._check() > 0
        self._some_left()
        return lost

    async def figures(self) -> dict[str, float]:
        """Engines that answer, losses so far, and what became of requests since this was last asked."""
        moved = RouterFigures()
        for group in self._routers:
            answers: list[RouterFigures] = await group.call_async(
                "take_router_figures", stage="figures", deadline_seconds=self._deadlines.health
            )
            for one in answers:
                moved.moved_requests += one.moved_requests
                moved.kept_tokens += one.kept_tokens
                moved.failed_requests += one.failed_requests
        return {
            "generation/replicas": float(len(self.group.workers)),
            "generation/replicas_lost": float(len(self._losses)),
            "generation/replicas_restarted": float(self._num_restarted),
            "generation/requests_moved": float(moved.moved_requests),
            "generation/tokens_kept": float(moved.kept_tokens),
            "generation/requests_failed": float(moved.failed_requests),
            "generation/retries": float(sum(await asyncio.gather(*map(self._retries, self.group.workers)))),
        }

    async def _retries(self, worker: Worker) -> int:
        """Of requests to a server that is not ours, since they were last asked for."""
        try:
            stats: EngineStats = await worker.call_async(
                "stats", stage="figures", deadline_seconds=self._deadlines.health
            )
        except ClusterError:  # which the next check finds, and names
            return 0
        return stats.retries

    async def _watch_on(self) -> None:
        while True:
            await asyncio.sleep(self._deadlines.health)
            await self.check()

    async def _check(self) -> int:
        workers = self.group.workers
        causes = await asyncio.gather(*(self._ask(worker) for worker in workers))
        lost = {w.rank: (w, cause) for w, cause in zip(workers, causes, strict=True) if cause is not None}
        for worker, cause in await self._lost_to_routers():
            lost.setdefault(worker.rank, (worker, cause))
        for worker, cause in lost.values():
            self._lose(worker, cause)
        return len(lost)

    async def _lost_to_routers(self) -> list[tuple[Worker, str]]:
        """Engines that a router has seen fail and asks nothing any more, so that they would stand idle."""
        found = []
        for routers in self._routers:
            answers: list[dict[str, str]] = await routers.call_async(
                "lost_replicas", stage="health check", deadline_seconds=self._deadlines.health
            )
            found += [
                (worker, one[_name(worker)])
                for one in answers
                for worker in self.group.workers
                if _name(worker) in one and worker.rank not in self._unannounced
            ]
        return found

    async def _ask(self, worker: Worker) -> str | None:
        """Why this engine is lost; None if it is not."""
        try:
            health: EngineHealth = await worker.call_async(
                "health", stage="health check", deadline_seconds=self._deadlines.health
            )
        except WorkerFailed as error:
            return error.message if error.kind == _ENGINE_FAILED else str(error)
        except ClusterError as error:
            return str(error)
        return hanging(health, self._deadlines.engine_step)

    def _lose(self, worker: Worker, cause: str) -> None:
        name = _name(worker)
        logger.warning("%s is lost: %s", name, cause)
        self._losses.append((name, cause))
        self.group.drop(worker)
        self._unannounced.add(worker.rank)
        self._layout_changed()
        if self._restarts[worker.rank] < MOST_RESTARTS:
            self._restarts[worker.rank] += 1
            self._coming.append(asyncio.create_task(self._restart(worker.rank)))

    def _some_left(self) -> None:
        if not self.group.workers:
            raise NoReplicaLeft(dict(self._losses))

    async def _restart(self, rank: int) -> Worker | None:
        try:
            return await self.group.restart_async(rank, self._deadlines.start)
        except ClusterError as error:
            logger.warning("generation replica %d could not be started again: %s", rank, error)
            return None

    def _admit(self) -> list[Worker]:
        """Let engines that have started again take part in the refit."""
        done = [task for task in self._coming if task.done()]
        self._coming = [task for task in self._coming if not task.done()]
        came = [worker for task in done if (worker := task.result()) is not None]
        for worker in came:
            self.group.admit(worker)
            self._layout_changed()
        return came

    async def _announce(self, came: list[Worker]) -> None:
        """Let requests go to engines that came back and have the weights in use."""
        for worker in came:
            logger.warning("generation replica %d was started again and samples", worker.rank)
            self._num_restarted += 1
            self._unannounced.discard(worker.rank)
            for group in self._routers:
                await group.call_async(
                    "add_engine", worker, stage="generation", deadline_seconds=self._deadlines.health
                )


def _name(worker: Worker) -> str:
    """As routers call it."""
    return f"generation replica {worker.rank}"


def _nothing() -> None:
    """In place of what is to be told of a change."""
