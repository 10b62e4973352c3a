"""The supervisor of engine replicas: notices losses, restarts what was lost, and admits it again.

    UP ──lost──▶ LOST ──attempt──▶ STARTING ──started──▶ READY ──admitted──▶ UP
                  ▲ ◀────failed───────┘ ◀───────lost───────┘

The process of a lost replica is ended, and its requests move to other replicas. A replica that was restarted
has the weights of the model's folder: it is admitted with the next weight update, at once before the first.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from statistics import fmean
from typing import Protocol

from nemorl.cluster.errors import ClusterError, DeadlineExceeded, WorkerFailed
from nemorl.cluster.group import WorkerGroup
from nemorl.config.run import DeadlineConfig
from nemorl.generation.router import Replica, RouterMetrics
from nemorl.generation.types import EngineFailed, EngineHealth, EngineStats, NoReplicaLeft

from .handles import EngineHandle

_ENGINE_FAILED = f"{EngineFailed.__module__}.{EngineFailed.__qualname__}"
MAX_RESTARTS = 3  # of one replica in a run: what dies more often has a cause that no restart fixes

logger = logging.getLogger(__name__)


class State(Enum):
    UP = auto()  # in the group, so that it takes part in weight updates
    LOST = auto()  # its process was ended; it is restarted if attempts are left
    STARTING = auto()
    READY = auto()  # started, and not in the group yet


@dataclass(eq=False)
class Supervised:
    engine: EngineHandle  # of its latest process
    state: State = State.UP
    announced: bool = True  # the routers send requests to it
    attempts: int = 0  # to restart it
    ended_for: str | None = None  # why its process was ended while a call of its group was running
    restart: asyncio.Task[None] | None = None

    @property
    def can_return(self) -> bool:  # unless it is lost without attempts left
        return self.state is not State.LOST or self.attempts < MAX_RESTARTS


class Routers(Protocol):
    async def take_metrics(self, seconds: float) -> list[RouterMetrics]:
        """What became of requests since the last call, by router."""

    async def lost_replicas(self, seconds: float) -> list[dict[str, str]]:
        """The cause of each loss by the replica's name, by router."""

    async def add(self, replica: Replica, seconds: float) -> None:
        """Send requests to this replica too, which takes the place of a lost one."""


class ReplicaSupervisor:
    """Supervises the engines of a group. Belongs to one event loop.

    Engines that share their devices with the policy have them inside `awake`, and for their weights from a
    weight update on; otherwise they sleep, and none is started.
    """

    def __init__(self, group: WorkerGroup, deadlines: DeadlineConfig, shares_devices: bool = False) -> None:
        """Engines that share their devices have been started while no other process used them."""
        self.group = group
        self._deadlines = deadlines
        self.shares_devices = shares_devices
        self._replicas = {worker.rank: Supervised(EngineHandle(worker)) for worker in group.workers}
        self._routers: list[Routers] = []
        self.on_change: Callable[[], None] = lambda: None  # called when engines leave or join the group
        self._lock = asyncio.Lock()  # held while the group must not change
        self._may_start = asyncio.Event()  # the devices are free for engines that start
        self._may_start.set()
        self._none_starting = asyncio.Event()
        self._none_starting.set()
        self._initial_weights = True  # until the first update
        self.losses: list[tuple[str, str]] = []  # so far: the replica's name and the cause
        self._num_logged = 0  # of the losses
        self._num_restarted = 0
        self._num_failed_restarts = 0
        self._watch: asyncio.Task[None] | None = None

    @property
    def engines(self) -> list[EngineHandle]:
        return [replica.engine for replica in self.in_state(State.UP)]

    @property
    def exhausted(self) -> bool:  # no engine is up, and none will return
        return not any(replica.can_return for replica in self._replicas.values())

    def in_state(self, state: State) -> list[Supervised]:
        return [replica for replica in self._replicas.values() if replica.state is state]

    def log_losses(self) -> None:
        """Warn of each loss once. Not for when no engine is up: an error then names all."""
        for name, cause in self.losses[self._num_logged :]:
            logger.warning("%s is lost: %s", name, cause)
        self._num_logged = len(self.losses)

    def connect(self, routers: Routers) -> None:
        """Announce engines that return to these routers, and read the losses that they have seen."""
        self._routers.append(routers)

    def start_watch(self) -> None:
        async def check_periodically() -> None:
            while True:
                await asyncio.sleep(self._deadlines.health)
                await self.check()

        self._watch = asyncio.create_task(check_periodically())

    def check_watch(self) -> None:
        if self._watch is not None and self._watch.done():
            self._watch.result()

    async def close(self) -> None:
        tasks = [self._watch, *(replica.restart for replica in self._replicas.values())]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def check(self) -> int:
        async with self._lock:
            lost = await self._check_and_admit()
            if self.engines:
                self.log_losses()
            return lost

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Inside, engines that share their devices have them; they keep them after an error.

        Raises NoReplicaLeft.
        """
        if not self.shares_devices:
            yield
            return
        async with self._lock:
            await self._check_and_admit()
            await self._wake(())
        self._may_start.set()
        yield
        await self.sleep()

    async def sleep(self) -> None:
        """Let engines that share their devices leave them, once none is starting."""
        self._may_start.clear()
        await self._none_starting.wait()
        async with self._lock:
            started = [*self.in_state(State.UP), *self.in_state(State.READY)]
            await self._on_each(started, lambda engine: engine.sleep(1, self._deadlines.refit))
            if self.engines:
                self.log_losses()

    @asynccontextmanager
    async def refitting(self) -> AsyncIterator[None]:
        """Inside, weights are updated; the group changes only by `lost_in_refit`. Raises NoReplicaLeft."""
        async with self._lock:
            self.check_watch()
            await self._check()
            admitted = self._admit()
            self._require_one()
            self._initial_weights = False
            if self.shares_devices:
                await self._wake(("weights",))
            async with self._ending_silent():
                yield
            # The update may have lost some of them again.
            await self._announce([replica for replica in admitted if replica.state is State.UP])

    async def lost_in_refit(self) -> bool:
        """True if engines were lost while `refitting`, so that the others may retry. Raises NoReplicaLeft."""
        lost = await self._check() > 0
        self._require_one()
        return lost

    async def metrics(self) -> dict[str, float]:
        seconds = self._deadlines.health

        async def stats(engine: EngineHandle) -> EngineStats:
            try:
                return await engine.stats(seconds)
            except ClusterError:  # which the next check finds, and names
                return EngineStats()

        of_engines = await asyncio.gather(*map(stats, self.engines))
        idle = [max(0.0, 1 - one.busy_seconds / one.seconds) for one in of_engines if one.seconds > 0]
        of_routers = [one for routers in self._routers for one in await routers.take_metrics(seconds)]
        return {
            "generation/replicas": float(len(self.engines)),
            "generation/replicas_lost": float(len(self.losses)),
            "generation/replicas_restarted": float(self._num_restarted),
            "generation/restarts_failed": float(self._num_failed_restarts),
            "generation/requests_moved": float(sum(one.moved_requests for one in of_routers)),
            "generation/tokens_kept": float(sum(one.kept_tokens for one in of_routers)),
            "generation/requests_failed": float(sum(one.failed_requests for one in of_routers)),
            "generation/retries": float(sum(one.retries for one in of_engines)),
            **({"idle/generation": fmean(idle)} if idle else {}),
        }

    async def _check_and_admit(self) -> int:
        lost = await self._check()
        if self._initial_weights:  # with which an engine that has been restarted samples too
            await self._announce(self._admit())
        return lost

    async def _check(self) -> int:
        up = self.in_state(State.UP)
        causes = dict(zip(up, await asyncio.gather(*map(self._cause_of_loss, up)), strict=True))
        # An engine that a router has seen fail gets no requests from it any more, so that it would be idle.
        for routers in self._routers:
            for lost in await routers.lost_replicas(self._deadlines.health):
                for replica in up:
                    if replica.announced and replica.engine.name in lost:
                        causes[replica] = causes[replica] or lost[replica.engine.name]
        losses = [(replica, cause) for replica, cause in causes.items() if cause is not None]
        for replica, cause in losses:
            self._lose(replica, cause)
        return len(losses)

    async def _cause_of_loss(self, replica: Supervised) -> str | None:
        if replica.ended_for is not None:
            return replica.ended_for
        try:
            health = await replica.engine.health(self._deadlines.health)
        except WorkerFailed as error:
            return error.message if error.kind == _ENGINE_FAILED else str(error)
        except ClusterError as error:
            return str(error)
        return hanging(health, self._deadlines.engine_step)

    @asynccontextmanager
    async def _ending_silent(self) -> AsyncIterator[None]:
        """Inside, engines that do not answer are ended, so that what waits for them fails."""

        async def end_silent() -> None:
            while True:
                await asyncio.sleep(self._deadlines.health)
                left = [replica for replica in self.in_state(State.UP) if replica.ended_for is None]
                await asyncio.gather(*map(end_if_silent, left))

        async def end_if_silent(replica: Supervised) -> None:
            try:
                await replica.engine.health(self._deadlines.health)
            except DeadlineExceeded as error:
                replica.ended_for = str(error)
                self.group.kill(replica.engine.worker)
            except ClusterError:  # it answers, or the running call reports its death
                pass

        watch = asyncio.create_task(end_silent())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _set(self, replica: Supervised, state: State) -> None:
        replica.state = state
        if self.in_state(State.STARTING):
            self._none_starting.clear()
        else:
            self._none_starting.set()

    def _lose(self, replica: Supervised, cause: str) -> None:
        """UP or READY to LOST."""
        self.losses.append((replica.engine.name, replica.ended_for or cause))
        replica.ended_for, replica.announced = None, False
        self.group.drop(replica.engine.worker)
        self._set(replica, State.LOST)
        self.on_change()
        if replica.can_return:
            replica.restart = asyncio.create_task(self._restart(replica))

    async def _restart(self, replica: Supervised) -> None:
        """LOST to STARTING to READY, or back to LOST as long as attempts are left."""
        name, rank = replica.engine.name, replica.engine.worker.rank
        while replica.can_return:
            await self._may_start.wait()
            replica.attempts += 1
            self._set(replica, State.STARTING)
            try:
                replica.engine = EngineHandle(await self.group.restart(rank, self._deadlines.start))
            except Exception as error:  # noqa: BLE001 - Ray's errors as well; each is logged and counted
                self._set(replica, State.LOST)
                self._num_failed_restarts += 1
                left = MAX_RESTARTS - replica.attempts
                logger.warning("%s could not be restarted (attempts left: %d): %s", name, left, error)
            else:
                self._set(replica, State.READY)
                return
            await asyncio.sleep(self._deadlines.health)

    def _admit(self) -> list[Supervised]:
        """READY to UP: restarted engines take part in the group's calls."""
        admitted = self.in_state(State.READY)
        for replica in admitted:
            self.group.admit(replica.engine.worker)
            self._set(replica, State.UP)
            self.on_change()
        return admitted

    async def _announce(self, admitted: list[Supervised]) -> None:
        """Let requests go to engines that are up again and have the weights in use."""
        if admitted:
            self.log_losses()
        for replica in admitted:
            logger.warning("%s restarted and back in rotation", replica.engine.name)
            self._num_restarted += 1
            replica.announced = True
            for routers in self._routers:
                await routers.add(replica.engine.as_replica(), self._deadlines.health)

    def _require_one(self) -> None:
        if not self.engines:
            raise NoReplicaLeft(dict(self.losses))
        self.log_losses()

    async def _wake(self, tags: tuple[str, ...]) -> None:
        await self._on_each(self.in_state(State.UP), lambda engine: engine.wake(tags, self._deadlines.refit))
        self._require_one()

    async def _on_each(
        self, replicas: list[Supervised], act: Callable[[EngineHandle], Awaitable[None]]
    ) -> None:
        """Call engines. One that fails may still occupy devices that others need, so it is lost."""

        async def failure(replica: Supervised) -> str | None:
            try:
                await act(replica.engine)
            except ClusterError as error:
                return str(error)
            return None

        async with self._ending_silent():
            causes = await asyncio.gather(*map(failure, replicas))
        for replica, cause in zip(replicas, causes, strict=True):
            if cause is not None:
                self._lose(replica, cause)


def hanging(health: EngineHealth, step_seconds: float) -> str | None:
    """Why an engine that answers is lost nevertheless; None if it is not."""
    busy = health.running + health.waiting > 0 and not health.paused
    if not busy or health.seconds_since_step <= step_seconds:
        return None
    return (
        f"no step for {health.seconds_since_step:.0f} s, while {health.running} sequences run and "
        f"{health.waiting} wait (cluster.deadlines.engine_step is {step_seconds:g})"
    )
