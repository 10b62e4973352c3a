"""The engines of a run while some may be lost: who answers, why others do not, and who comes back.

Whether engines answer and get on with their work.

Engines that are started again, and how often.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from nemorl.cluster.errors import ClusterError, DeadlineExceeded, WorkerFailed
from nemorl.cluster.group import Worker, WorkerGroup
from nemorl.config.run import DeadlineConfig
from nemorl.generation.router import RouterMetrics
from nemorl.generation.types import EngineFailed, EngineHealth, EngineStats, NoReplicaLeft

_ENGINE_FAILED = f"{EngineFailed.__module__}.{EngineFailed.__qualname__}"


def hanging(health: EngineHealth, step_seconds: float) -> str | None:
    """Why an engine that answers is lost nevertheless; None if it is not."""
    at_work = health.running + health.waiting > 0 and not health.paused
    if not at_work or health.seconds_since_step <= step_seconds:
        return None
    return (
        f"no step for {health.seconds_since_step:.0f} s, while {health.running} sequences run and "
        f"{health.waiting} wait (cluster.deadlines.engine_step is {step_seconds:g})"
    )


class HealthChecks:
    """Asks the engines of a group how they are. Belongs to one event loop."""

    def __init__(self, group: WorkerGroup, deadlines: DeadlineConfig) -> None:
        self._group = group
        self._deadlines = deadlines
        self._ended: dict[int, str] = {}  # ranks whose processes were ended here, with the cause

    async def cause_of_loss(self, worker: Worker) -> str | None:
        """Why this engine is lost; None if it is not."""
        if worker.rank in self._ended:
            return self._ended[worker.rank]
        try:
            health = await self._ask(worker)
        except WorkerFailed as error:
            return error.message if error.kind == _ENGINE_FAILED else str(error)
        except ClusterError as error:
            return str(error)
        return hanging(health, self._deadlines.engine_step)

    def take_cause(self, worker: Worker, otherwise: str) -> str:
        """Why the process was ended, if it was here; its rank may then be started again."""
        return self._ended.pop(worker.rank, otherwise)

    @asynccontextmanager
    async def silent_ended(self) -> AsyncIterator[None]:
        """Inside, the process of an engine that does not answer is ended, so that what waits for it fails.

        It stays in the group, of which a call may be under way.
        """

        async def end_silent() -> None:
            while True:
                await asyncio.sleep(self._deadlines.health)
                await asyncio.gather(*map(self._end_if_silent, self._group.workers))

        watch = asyncio.create_task(end_silent())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _end_if_silent(self, worker: Worker) -> None:
        if worker.rank in self._ended:
            return
        try:
            await self._ask(worker)
        except DeadlineExceeded as error:
            self._ended[worker.rank] = str(error)
            self._group.kill(worker)
        except ClusterError:  # it does answer, or the call will tell of its death
            return

    async def _ask(self, worker: Worker) -> EngineHealth:
        health: EngineHealth = await worker.call(
            "health", stage="health check", deadline_seconds=self._deadlines.health
        )
        return health


logger = logging.getLogger(__name__)

# Of one replica in a run, whether they succeed or not: what dies more often has a cause that starting it
# again does not mend.
MAX_RESTARTS = 3


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
        if self._attempts[rank] < MAX_RESTARTS:
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
                left = MAX_RESTARTS - self._attempts[rank]
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
            return await self._group.restart(rank, self._start_seconds)
        finally:
            self._starting -= 1
            if not self._starting:
                self._quiet.set()


class Routers(Protocol):
    """Some routers: a `WorkerGroup` whose workers have one each, or what answers like it."""

    async def call(self, method: str, *args: Any, stage: str, deadline_seconds: float) -> list[Any]:
        """`take_router_metrics()`, `lost_replicas()` and `add_engine(worker)`."""
        ...


class GenerationPool:
    """Watches the engines, gives up those that died or hang, and starts them again.

    A lost engine's process is ended, which the routers see at once: its requests go on elsewhere. One that
    was started again has the weights of the model's folder, so it takes part when the next refit has reached
    it, or at once while generation still samples with those. Belongs to one event loop.

    Engines that share their devices with the policy have them inside `awake`, and for their weights from a
    refit on; elsewhere they sleep, and none is started.
    """

    def __init__(
        self, group: WorkerGroup, deadlines: DeadlineConfig, *, shares_devices: bool = False
    ) -> None:
        """Engines that share their devices have been started when nobody else used them."""
        self.group = group
        self._deadlines = deadlines
        self._shares_devices = shares_devices
        self._routers: list[Routers] = []
        self._layout_changed: Callable[[], None] = _nothing
        self._lock = asyncio.Lock()  # held while the engines must not change
        self._losses: list[tuple[str, str]] = []  # replica and cause
        self._num_told = 0  # of the losses
        self._own_weights = True  # engines sample with those they loaded, so that a new one may join at once
        self._health = HealthChecks(group, deadlines)
        self._restarts = Restarts(group, start_seconds=deadlines.start, pause_seconds=deadlines.health)
        self._num_restarted = 0
        self._unannounced: set[int] = set()  # ranks that routers do not know to be back
        self._watch: asyncio.Task[None] | None = None

    @property
    def losses(self) -> tuple[tuple[str, str], ...]:
        """Each loss so far: the replica's name and the cause."""
        return tuple(self._losses)

    @property
    def hopeless(self) -> bool:
        """Whether no engine answers, and none is coming."""
        return not self.group.workers and not self._restarts.expected

    def tell_losses(self) -> None:
        """Warn of each loss once. Where no engine is left, an error that names them all is likely to follow,
        so the pool itself does not tell of the last one before another engine has come.
        """
        for name, cause in self._losses[self._num_told :]:
            logger.warning("%s is lost: %s", name, cause)
        self._num_told = len(self._losses)

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
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._restarts.close()

    async def check(self) -> int:
        """Ask every engine how it is; the number of those that were given up for their answer."""
        async with self._lock:
            lost = await self._check()
            if self._own_weights:
                await self._announce(self._admit())
            if self.group.workers:
                self.tell_losses()
            return lost

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Inside, engines that share their devices have them. Raises NoReplicaLeft.

        An error that leaves the block ends the run, and nobody else wants the devices then.
        """
        async with self._lock:
            await self._check()
            if self._own_weights:
                await self._announce(self._admit())
            await self._wake(())
        self._restarts.allow()
        yield
        await self.rest()

    async def rest(self) -> None:
        """Let engines that share their devices leave them, once those that are being started have started."""
        await self._restarts.forbid()
        async with self._lock:
            await self._on_each([*self.group.workers, *self._restarts.ready], "sleep", 1)
            if self.group.workers:
                self.tell_losses()

    async def _wake(self, tags: tuple[str, ...]) -> None:
        await self._on_each(self.group.workers, "wake", tags)
        self._some_left()

    async def _on_each(self, workers: Iterable[Worker], method: str, argument: object) -> None:
        """Call a method of engines. One that fails at it may stay where others want to be, so it is lost."""

        async def fails(worker: Worker) -> str | None:
            try:
                await worker.call(
                    method,
                    argument,
                    stage=f"engines {method}",
                    deadline_seconds=self._deadlines.refit,
                )
            except ClusterError as error:
                return str(error)
            return None

        called = list(workers)
        async with self._health.silent_ended():
            causes = await asyncio.gather(*map(fails, called))
        for worker, cause in zip(called, causes, strict=True):
            if cause is not None:
                self._lose(worker, cause)

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
            if self._shares_devices:
                await self._wake(("weights",))
            async with self._health.silent_ended():
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

    async def metrics(self) -> dict[str, float]:
        """Engines that answer, losses so far, and what became of requests since this was last asked."""
        moved = RouterMetrics()
        for group in self._routers:
            answers: list[RouterMetrics] = await group.call(
                "take_router_metrics", stage="figures", deadline_seconds=self._deadlines.health
            )
            for one in answers:
                moved.moved_requests += one.moved_requests
                moved.kept_tokens += one.kept_tokens
                moved.failed_requests += one.failed_requests
        return {
            "generation/replicas": float(len(self.group.workers)),
            "generation/replicas_lost": float(len(self._losses)),
            "generation/replicas_restarted": float(self._num_restarted),
            "generation/restarts_failed": float(self._restarts.num_failed),
            "generation/requests_moved": float(moved.moved_requests),
            "generation/tokens_kept": float(moved.kept_tokens),
            "generation/requests_failed": float(moved.failed_requests),
            "generation/retries": float(sum(await asyncio.gather(*map(self._retries, self.group.workers)))),
        }

    async def _retries(self, worker: Worker) -> int:
        """Of requests to a server that is not ours, since they were last asked for."""
        try:
            stats: EngineStats = await worker.call(
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
        causes = await asyncio.gather(*map(self._health.cause_of_loss, workers))
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
            answers: list[dict[str, str]] = await routers.call(
                "lost_replicas", stage="health check", deadline_seconds=self._deadlines.health
            )
            found += [
                (worker, one[_name(worker)])
                for one in answers
                for worker in self.group.workers
                if _name(worker) in one and worker.rank not in self._unannounced
            ]
        return found

    def _lose(self, worker: Worker, cause: str) -> None:
        name, cause = _name(worker), self._health.take_cause(worker, cause)
        self._losses.append((name, cause))
        self.group.drop(worker)
        self._restarts.forget(worker)
        self._unannounced.add(worker.rank)
        self._layout_changed()
        self._restarts.begin(worker.rank)

    def _some_left(self) -> None:
        if not self.group.workers:
            raise NoReplicaLeft(dict(self._losses))
        self.tell_losses()

    def _admit(self) -> list[Worker]:
        """Let engines that have started again take part in the refit."""
        came = self._restarts.take()
        for worker in came:
            self.group.admit(worker)
            self._layout_changed()
        return came

    async def _announce(self, came: list[Worker]) -> None:
        """Let requests go to engines that came back and have the weights in use."""
        if came:
            self.tell_losses()
        for worker in came:
            logger.warning("generation replica %d was started again and samples", worker.rank)
            self._num_restarted += 1
            self._unannounced.discard(worker.rank)
            for group in self._routers:
                await group.call(
                    "add_engine", worker, stage="generation", deadline_seconds=self._deadlines.health
                )


def _name(worker: Worker) -> str:
    """As routers call it."""
    return f"generation replica {worker.rank}"


def _nothing() -> None:
    """In place of what is to be told of a change."""
