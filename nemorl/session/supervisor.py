"""Supervisors of processes that do not need each other: engine replicas, rollout workers, environment actors.

    UP ──lost──▶ LOST ──attempt──▶ STARTING ──started──▶ READY ──admitted──▶ UP
                  ▲ ◀────failed───────┘ ◀───────lost───────┘

The process of a lost member is ended, and its work moves to other members or waits for one that returns: the
tokens of requests continue on another replica, the groups of a rollout worker are sampled again.

Replicas also join and leave (`scale`): one that joins is started like a lost one; the requests of one that
leaves move before its process ends.

A replica that was restarted has the weights of the model's folder: it is admitted with the next weight
update, at once before the first. While no other is up, the session sends it the weights in use (`starved`).
"""

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, Literal, Protocol, TypeVar

from nemorl.cluster.errors import ClusterError, DeadlineExceeded, PlacementFailed, WorkerFailed
from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.worker import Worker
from nemorl.config.run import ClusterConfig
from nemorl.errors import RunError
from nemorl.generation.router import Replica, RouterMetrics
from nemorl.generation.types import EngineFailed, EngineHealth, EngineStats, NoReplicaLeft
from nemorl.observe.live import LiveEngine
from nemorl.rollout.concurrency import PlacesUse
from nemorl.serve.environment_sessions import SessionCounts

from .handles import EngineHandle, EnginesHandle, EnvironmentActorsHandle, RolloutHandle, RolloutsHandle

_ENGINE_FAILED = f"{EngineFailed.__module__}.{EngineFailed.__qualname__}"

logger = logging.getLogger(__name__)


class State(Enum):
    UP = auto()  # in the group, so that it takes part in its calls
    LOST = auto()  # its process was ended; it is restarted if attempts are left
    STARTING = auto()
    READY = auto()  # started, and not in the group yet


@dataclass(eq=False)
class Supervised:
    worker: Worker  # of its latest process
    state: State = State.UP
    attempts: int = 0  # to restart it, since it last did its work
    ended_for: str | None = None  # why its process was ended, or a call failed, before a check found it
    end: asyncio.Task[None] | None = None  # of the process
    restart: asyncio.Task[None] | None = None
    joins: bool = False  # and was never up


T = TypeVar("T")
M = TypeVar("M", bound=Supervised)


class Supervisor(ABC, Generic[M]):
    """Supervises the members of a group. Belongs to one event loop."""

    kind: str  # of its members, in names
    plural: str

    def __init__(self, group: WorkerGroup, config: ClusterConfig, members: Iterable[M]) -> None:
        self.group = group
        self.members = list(members)
        self.on_change: Callable[[], None] = lambda: None  # called when members leave or join the group
        self.losses: list[tuple[str, str]] = []  # so far: the member's name and the cause
        self._deadlines, self._max_restarts = config.deadlines, config.max_worker_restarts
        self._causes: dict[str, str] = {}  # why a member is not up, by name
        self._lock = asyncio.Lock()  # held while the group must not change
        self._may_start = asyncio.Event()  # the devices are free for processes that start
        self._may_start.set()
        self._num_logged = 0  # of the losses
        self._num_restarted = 0
        self._num_failed_restarts = 0
        self._to_check = asyncio.Event()  # at once
        self._watch: asyncio.Task[None] | None = None

    @property
    def exhausted(self) -> bool:  # no member is up, and none will return
        return not any(map(self._can_return, self.members))

    def in_state(self, state: State) -> list[M]:
        return [member for member in self.members if member.state is state]

    def log_losses(self) -> None:
        """Warn of each loss once. Not for when no member returns: an error then names all."""
        for name, cause in self.losses[self._num_logged :]:
            logger.warning("%s is lost: %s", name, cause)
        self._num_logged = len(self.losses)

    def start_watch(self) -> None:
        """Check the members periodically, and at once when a process has ended."""

        async def watch() -> None:
            while True:
                up = self.in_state(State.UP)
                for member in up:
                    member.end = member.end or asyncio.create_task(member.worker.ended())
                alarm = asyncio.create_task(self._to_check.wait())
                events = [alarm, *(member.end for member in up if member.end is not None)]
                seconds = self._deadlines.health
                await asyncio.wait(events, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                alarm.cancel()
                self._to_check.clear()
                await self.check()

        self._watch = asyncio.create_task(watch())

    def check_watch(self) -> None:
        if self._watch is not None and self._watch.done():
            self._watch.result()

    async def close(self) -> None:
        await _cancel(self._watch, *(task for m in self.members for task in (m.end, m.restart)))
        for member in self.in_state(State.READY):  # which do not end with the group
            self.group.kill(member.worker)

    async def check(self) -> int:
        """Find losses, and let members that were restarted return where they can; the number of losses."""
        async with self._lock:
            lost = await self._check()
            await self._admit_returned()
            if not self.exhausted:
                self.log_losses()
            return lost

    def metrics(self) -> dict[str, float]:
        return {
            self.plural: float(len(self.in_state(State.UP))),
            f"{self.plural}_lost": float(len(self.losses)),
            f"{self.plural}_restarted": float(self._num_restarted),
            f"{self.plural.partition('/')[0]}/restarts_failed": float(self._num_failed_restarts),
        }

    def name(self, member: M) -> str:
        return f"{self.kind} {member.worker.rank}"

    @abstractmethod
    async def _states(self) -> Mapping[int, Any]:
        """What shows that each worker of the group works, by rank, or a ClusterError in its place."""

    @abstractmethod
    def _problem(self, member: M, state: Any) -> str | None:
        """Why a member with this state, or error, is lost; None if it is not."""

    @abstractmethod
    async def _admit_returned(self) -> None:
        """READY to UP, where that is possible now."""

    @abstractmethod
    async def _give_up(self, member: M) -> None:
        """For a member that is lost without attempts left."""

    async def _check(self) -> int:
        up, states = self.in_state(State.UP), await self._states()
        causes = [member.ended_for or self._problem(member, states[member.worker.rank]) for member in up]
        losses = [(m, cause) for m, cause in zip(up, causes, strict=True) if cause is not None]
        for member, cause in losses:
            self._lose(member, cause)
        return len(losses)

    def _can_return(self, member: M) -> bool:  # unless it is lost without attempts left
        return member.state is not State.LOST or member.attempts < self._max_restarts

    def _set(self, member: M, state: State) -> None:
        member.state = state

    def _lose(self, member: M, cause: str) -> None:
        """UP or READY to LOST."""
        name, cause = self.name(member), member.ended_for or cause
        self.losses.append((name, cause))
        self._causes[name] = cause
        if member.end is not None:
            member.end.cancel()
        member.ended_for = member.end = None
        self.group.drop(member.worker)
        self._set(member, State.LOST)
        self.on_change()
        member.restart = asyncio.create_task(self._restart(member))

    async def _restart(self, member: M) -> None:
        """LOST to STARTING to READY, or back to LOST as long as attempts are left.

        One whose node is lost stays LOST until it has a place on another.
        """
        name, rank, cause = self.name(member), member.worker.rank, self._causes[self.name(member)]
        while self._can_return(member):
            try:
                await self.group.await_place(rank)
                await self._may_start.wait()
                member.attempts += 1
                self._set(member, State.STARTING)
                member.worker = await self.group.restart(rank, self._deadlines.start)
            except Exception as error:  # noqa: BLE001 - Ray's errors as well; each is logged and counted
                self._set(member, State.LOST)
                self._num_failed_restarts += not member.joins
                if isinstance(error, PlacementFailed):  # it says that there will be no place
                    member.attempts = self._max_restarts
                left = self._max_restarts - member.attempts
                logger.warning("%s could not be started (attempts left: %d): %s", name, left, error)
                self._causes[name] = f"{cause}\nand could not be restarted: {error}" if cause else str(error)
            else:
                self._set(member, State.READY)
                self._to_check.set()
                return
            if self._can_return(member):
                await asyncio.sleep(self._deadlines.health)
        await self._give_up(member)

    def _admit(self) -> list[M]:
        """READY to UP: restarted members take part in the group's calls."""
        admitted = self.in_state(State.READY)
        for member in admitted:
            self.group.admit(member.worker)
            self._set(member, State.UP)
            self.on_change()
        return admitted

    def _log_return(self, member: M) -> None:
        self.log_losses()
        logger.warning("%s restarted and back in rotation", self.name(member))
        self._num_restarted += 1
        self._causes.pop(self.name(member), None)


class Routers(Protocol):
    async def take_metrics(self, seconds: float) -> list[RouterMetrics]:
        """What became of requests since the last call, by router."""

    async def lost_replicas(self, seconds: float) -> list[dict[str, str]]:
        """The cause of each loss by the replica's name, by router."""

    async def add(self, replica: Replica, seconds: float) -> None:
        """Send requests to this replica too, which may take the place of a lost one."""

    async def remove(self, name: str, seconds: float) -> None:
        """Send no requests to a replica that leaves, and move those that it has."""

    async def give_up(self, causes: Mapping[str, str], seconds: float) -> None:
        """Fail requests that wait for a replica: none returns."""


@dataclass(eq=False)
class SupervisedReplica(Supervised):
    announced: bool = True  # the routers send requests to it
    reported: str | None = None  # why a router gave it up

    @property
    def engine(self) -> EngineHandle:
        return EngineHandle(self.worker)


@dataclass(frozen=True)
class ReplicaState:
    state: Literal["up", "waiting", "starting", "started", "lost"]  # waiting: for a place in the cluster
    cause: str = ""  # of one that is lost; empty if it is being restarted

    def __str__(self) -> str:
        texts = {
            "up": "up",
            "waiting": "waits for a place in the cluster",
            "starting": "starts",
            "started": "has started, and waits for the next weight update",
            "lost": f"given up: {self.cause}" if self.cause else "lost; it is started again",
        }
        return texts[self.state]


class ReplicaSupervisor(Supervisor[SupervisedReplica]):
    """Engines that share their devices with the policy have them inside `awake`, and for their weights from a
    weight update on; otherwise they sleep, and none is started.
    """

    kind, plural = "generation replica", "generation/replicas"

    def __init__(self, group: WorkerGroup, config: ClusterConfig, shares_devices: bool = False) -> None:
        """Engines that share their devices have been started while no other process used them."""
        super().__init__(group, config, map(SupervisedReplica, group.workers))
        self.shares_devices = shares_devices
        self._engines = EnginesHandle(group)
        self.starved = asyncio.Event()  # no engine is up, and one that has been restarted requires weights
        self._routers: list[Routers] = []
        self._none_starting = asyncio.Event()
        self._none_starting.set()
        self._initial_weights = True  # until the first update
        self._num_joined = self._num_left = 0

    @property
    def engines(self) -> list[EngineHandle]:
        return [replica.engine for replica in self.in_state(State.UP)]

    @property
    def announced(self) -> list[Replica]:
        """The engines to which the routers send requests."""
        return [replica.engine.as_replica() for replica in self.in_state(State.UP) if replica.announced]

    @property
    def states(self) -> dict[str, ReplicaState]:
        return {self.name(r): self._state(r) for r in sorted(self.members, key=lambda r: r.worker.rank)}

    async def live(self) -> list[LiveEngine]:
        """The state of each engine now, with what those that are up answer."""
        answers = await self._engines.health(self._deadlines.health)
        members = sorted(self.members, key=lambda member: member.worker.rank)
        return [_live(self.name(r), self._state(r), answers.get(r.worker.rank)) for r in members]

    def connect(self, routers: Routers) -> None:
        """Announce engines that return to these routers, and read the losses that they have seen."""
        self._routers.append(routers)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Inside, engines that share their devices have them; they keep them after an error.

        Raises NoReplicaLeft.
        """
        if not self.shares_devices:
            self.require_return()
            yield
            return
        async with self._lock:
            await self._check()
            await self._admit_returned()
        await self.wake()
        yield
        await self.sleep()

    async def wake(self) -> None:
        """Let engines that share their devices have them. Raises NoReplicaLeft."""
        async with self._lock:
            await self._wake(())
            self._may_start.set()
            await self._announce()

    async def sleep(self) -> None:
        """Let engines that share their devices leave them, once none is starting."""
        self._may_start.clear()
        await self._none_starting.wait()
        async with self._lock:
            started = [*self.in_state(State.UP), *self.in_state(State.READY)]
            await self._on_each(started, lambda engine: engine.sleep(1, self._deadlines.refit))
            if not self.exhausted:
                self.log_losses()

    @asynccontextmanager
    async def refitting(self) -> AsyncIterator[None]:
        """Inside, the weights of engines that are up are updated, if any is; the group changes only by
        `lost_in_refit`. Raises NoReplicaLeft.
        """
        async with self._lock:
            self.check_watch()
            await self._check()
            self._admit()
            self.require_return()
            self._initial_weights = False
            if self.shares_devices:
                await self._wake(("weights",))
            async with self._ending_silent():
                yield
            await self._announce()  # the update may have lost some of them again

    async def lost_in_refit(self) -> bool:
        """True if engines were lost while `refitting`, so that the others may retry. Raises NoReplicaLeft."""
        lost = await self._check() > 0
        self.require_return()
        return lost

    def require_return(self) -> None:
        """Raise NoReplicaLeft if no engine is up and none returns."""
        if self.exhausted:
            raise NoReplicaLeft(self._causes)
        self.log_losses()

    async def health(self) -> list[EngineHealth]:
        """Of the engines that answer."""
        return _answered(await self._engines.health(self._deadlines.health))

    async def scale(self, number: int) -> None:
        """Let engines join, in the background, or leave until there are `number`; replace those given up."""
        async with self._lock:
            for replica in self.members.copy():
                if not self._can_return(replica):
                    await self._leave(replica)
            # Those that are useful stay, and of these the first.
            in_use = sorted(self.members, key=lambda r: (r.state is State.UP, r.announced, -r.worker.rank))
            for replica in in_use[: max(0, len(self.members) - number)]:
                await self._leave(replica)
            ranks = {replica.worker.rank for replica in self.members}
            free = (rank for rank in itertools.count() if rank not in ranks)
            for rank in itertools.islice(free, number - len(self.members)):
                self._join(rank)

    @property
    def extra_nodes(self) -> set[str]:
        """IDs of the nodes of replicas that joined."""
        nodes = (self.group.extra_node(replica.worker.rank) for replica in self.members)
        return {node for node in nodes if node is not None}

    async def leave_nodes(self, nodes: Set[str]) -> None:
        """Let replicas that joined leave these nodes, given by ID, for others."""
        async with self._lock:
            for replica in self.members.copy():
                rank = replica.worker.rank
                if self.group.extra_node(rank) in nodes:
                    logger.warning("%s leaves a node that is drained", self.name(replica))
                    await self._leave(replica)
                    self._join(rank)

    def _join(self, rank: int) -> None:
        worker = Worker(self.group.name, rank, Path(), actor=None)  # until a process is started
        # Its first start is not a restart.
        replica = SupervisedReplica(worker, State.LOST, attempts=-1, announced=False, joins=True)
        self._causes[self.name(replica)] = ""
        self.members.append(replica)
        replica.restart = asyncio.create_task(self._restart(replica))

    async def _leave(self, replica: SupervisedReplica) -> None:
        name = self.name(replica)
        self.members.remove(replica)
        await _cancel(replica.restart, replica.end)
        state = replica.state
        self._set(replica, State.LOST)
        self._causes.pop(name, None)
        try:
            for routers in self._routers if state is State.UP else ():
                await routers.remove(name, self._deadlines.health)
        finally:
            if state is State.UP:
                self.group.drop(replica.worker)
                self.on_change()
            elif state is State.READY:
                self.group.kill(replica.worker)
            self.group.release(replica.worker.rank)
        if not replica.joins:
            self._num_left += 1
            logger.warning("%s has left", name)

    def _state(self, replica: SupervisedReplica) -> ReplicaState:
        match replica.state:
            case State.UP:
                return ReplicaState("up" if replica.announced else "started")
            case State.READY:
                return ReplicaState("started")
            case State.STARTING:
                waits = self.group.waits_for_place(replica.worker.rank)
                return ReplicaState("waiting" if waits else "starting")
        if replica.attempts < 0:  # it joins, and its first start has not begun
            return ReplicaState("starting")
        cause = "" if self._can_return(replica) else self._causes[self.name(replica)]
        return ReplicaState("lost", cause)

    async def take_metrics(self) -> dict[str, float]:
        seconds, replicas = self._deadlines.health, self.in_state(State.UP)
        stats = await self._engines.stats(seconds)
        for replica in replicas:
            of_replica = stats.get(replica.worker.rank)
            if isinstance(of_replica, EngineStats) and of_replica.tokens_generated:
                replica.attempts = 0
        of_engines = _answered(stats)  # the next check finds the others, and names them
        idle = [max(0.0, 1 - one.busy_seconds / one.seconds) for one in of_engines if one.seconds > 0]
        of_routers = [one for routers in self._routers for one in await routers.take_metrics(seconds)]
        return self.metrics() | {
            "generation/replicas_joined": float(self._num_joined),
            "generation/replicas_left": float(self._num_left),
            "generation/requests_moved": float(sum(one.moved_requests for one in of_routers)),
            "generation/tokens_kept": float(sum(one.kept_tokens for one in of_routers)),
            "generation/requests_failed": float(sum(one.failed_requests for one in of_routers)),
            "generation/retries": float(sum(one.retries for one in of_engines)),
            **_reuse(of_engines),
            **({"idle/generation": fmean(idle)} if idle else {}),
        }

    async def _admit_returned(self) -> None:
        if self._initial_weights:  # with which an engine that has been restarted samples too
            self._admit()
            await self._announce()

    async def _check(self) -> int:
        # An engine that a router has seen fail gets no requests from it any more, so that it would be idle.
        for routers in self._routers:
            of_routers = await routers.lost_replicas(self._deadlines.health)
            lost = {name: cause for of_router in of_routers for name, cause in of_router.items()}
            for replica in self.in_state(State.UP) if lost else ():
                if replica.announced and self.name(replica) in lost:
                    replica.reported = lost[self.name(replica)]
        return await super()._check()

    async def _states(self) -> Mapping[int, EngineHealth | ClusterError]:
        return await self._engines.health(self._deadlines.health)

    def _problem(self, member: SupervisedReplica, state: EngineHealth | ClusterError) -> str | None:
        if isinstance(state, WorkerFailed) and state.kind == _ENGINE_FAILED:
            return state.message
        if isinstance(state, ClusterError):
            return str(state)
        # A step may outlast several losses, so that tokens count as work, not only its end.
        if state.running + state.waiting > state.queued:
            member.attempts = 0
        return hanging(state, self._deadlines.engine_step) or member.reported

    @asynccontextmanager
    async def _ending_silent(self) -> AsyncIterator[None]:
        """Inside, engines that do not answer are ended, so that what waits for them fails."""

        seconds = self._deadlines.health

        async def end_silent() -> None:
            while True:
                await asyncio.sleep(seconds)
                states = await self._engines.health(seconds)
                for replica in self.in_state(State.UP):
                    silence = states.get(replica.worker.rank)  # the running call reports a death
                    if isinstance(silence, DeadlineExceeded) and replica.ended_for is None:
                        replica.ended_for = str(silence)
                        self.group.kill(replica.worker)

        watch = asyncio.create_task(end_silent())
        try:
            yield
        finally:
            await _cancel(watch)

    def _set(self, member: SupervisedReplica, state: State) -> None:
        super()._set(member, state)
        _set_if(self._none_starting, not self.in_state(State.STARTING))
        starved = not self.in_state(State.UP) and bool(self.in_state(State.READY))
        _set_if(self.starved, starved and not self._initial_weights)

    def _lose(self, member: SupervisedReplica, cause: str) -> None:
        member.announced, member.reported = False, None
        super()._lose(member, cause)

    def _log_return(self, member: SupervisedReplica) -> None:
        if not member.joins:
            super()._log_return(member)
            return
        member.joins = False
        self._num_joined += 1
        self._causes.pop(self.name(member), None)
        logger.warning("%s has joined", self.name(member))

    async def _give_up(self, member: SupervisedReplica) -> None:
        self.group.release(member.worker.rank)
        if self.exhausted:
            for routers in self._routers:
                await routers.give_up(self._causes, self._deadlines.health)

    async def _announce(self) -> None:
        """Let requests go to engines that are up again and have the weights in use, unless they sleep."""
        for replica in self.in_state(State.UP) if self._may_start.is_set() else ():
            if not replica.announced:
                self._log_return(replica)
                replica.announced = True
                for routers in self._routers:
                    await routers.add(replica.engine.as_replica(), self._deadlines.health)

    async def _wake(self, tags: tuple[str, ...]) -> None:
        await self._on_each(self.in_state(State.UP), lambda engine: engine.wake(tags, self._deadlines.refit))
        self.require_return()

    async def _on_each(
        self, replicas: list[SupervisedReplica], act: Callable[[EngineHandle], Awaitable[None]]
    ) -> None:
        """Call engines. One that fails may still occupy devices that others need, so it is lost."""

        async def failure(replica: SupervisedReplica) -> str | None:
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


class EnvironmentSupervisor(Supervisor[Supervised]):
    """Actors of one environment; rollout workers receive those that are up."""

    kind, plural = "environment actor", "environment/actors"

    def __init__(self, group: WorkerGroup, config: ClusterConfig) -> None:
        super().__init__(group, config, map(Supervised, group.workers))
        self._actors = EnvironmentActorsHandle(group)
        # Reports to rollout workers which are up; set before the watch starts.
        self.announce: Callable[[Sequence[Worker]], Awaitable[None]]

    async def _states(self) -> Mapping[int, SessionCounts | ClusterError]:
        return await self._actors.counts(self._deadlines.health)

    def _problem(self, member: Supervised, state: SessionCounts | ClusterError) -> str | None:
        if isinstance(state, ClusterError):
            return str(state)
        if state.answered:
            member.attempts = 0
        return None

    async def _check(self) -> int:
        num_lost = await super()._check()
        if num_lost:
            await self.announce(self.group.workers)
        return num_lost

    async def _admit_returned(self) -> None:
        if admitted := self._admit():
            await self.announce(self.group.workers)
        for member in admitted:
            self._log_return(member)

    async def _give_up(self, member: Supervised) -> None:
        name = self.name(member)
        logger.warning("%s of %s stays lost: %s", name, self.group.name, self._causes[name])


class NoRolloutWorkerLeft(RunError):
    """Every rollout worker is lost, and none can be restarted."""


@dataclass(eq=False)
class SupervisedRollout(Supervised):
    handle: RolloutHandle = field(kw_only=True)


class RolloutSupervisor(Supervisor[SupervisedRollout]):
    """Rollout workers are also the routers of the engines (`Routers`); those that do not answer are left out,
    since the next check finds them.
    """

    kind, plural = "rollout worker", "rollout/workers"

    def __init__(
        self,
        group: WorkerGroup,
        config: ClusterConfig,
        replicas: Callable[[], Sequence[Replica]],
        environments: Mapping[str, EnvironmentSupervisor] | None = None,
    ) -> None:
        """`replicas` returns those to which a router sends requests now; `environments` have actors."""
        seconds = config.deadlines.generation
        members = [SupervisedRollout(one, handle=RolloutHandle(one, seconds)) for one in group.workers]
        super().__init__(group, config, members)
        self._replicas, self._rollouts = replicas, RolloutsHandle(group)
        self._environments = dict(environments or {})
        for name, environment in self._environments.items():
            environment.announce = partial(self._announce, name)
        self.handles = [member.handle for member in self.members]  # without those that will not return

    async def take_metrics(self, seconds: float) -> list[RouterMetrics]:
        return _answered(await self._rollouts.take_metrics(seconds))

    async def lost_replicas(self, seconds: float) -> list[dict[str, str]]:
        return _answered(await self._rollouts.lost_replicas(seconds))

    async def add(self, replica: Replica, seconds: float) -> None:
        await self._rollouts.add(replica, seconds)

    async def remove(self, name: str, seconds: float) -> None:
        await self._rollouts.remove(name, seconds)

    async def give_up(self, causes: Mapping[str, str], seconds: float) -> None:
        await self._rollouts.give_up(causes, seconds)

    async def set_concurrency(self, limit: int) -> list[PlacesUse]:
        """Of the workers that answer; `limit` is that of each."""
        return _answered(await self._rollouts.set_concurrency(limit))

    async def _announce(self, environment: str, actors: Sequence[Worker]) -> None:
        await self._rollouts.set_actors(environment, actors, self._deadlines.health)

    async def _states(self) -> Mapping[int, dict[str, str] | ClusterError]:
        return await self._rollouts.lost_replicas(self._deadlines.health)

    def _problem(self, member: SupervisedRollout, state: dict[str, str] | ClusterError) -> str | None:
        if isinstance(state, ClusterError):
            return str(state)
        if member.handle.take_progress():
            member.attempts = 0
        return member.handle.cause

    async def _admit_returned(self) -> None:
        for member in self._admit():
            member.handle.worker = member.worker
            try:  # it was made with the engines at the start of the run
                await member.handle.reset(self._replicas(), self._deadlines.health)
                for name, environment in self._environments.items():
                    workers = environment.group.workers
                    await member.handle.set_actors(name, workers, self._deadlines.health)
            except ClusterError as error:
                self._lose(member, str(error))
            else:
                self._log_return(member)
                member.handle.set_up()

    def _lose(self, member: SupervisedRollout, cause: str) -> None:
        member.handle.set_lost(cause)
        super()._lose(member, cause)

    async def _give_up(self, member: SupervisedRollout) -> None:
        if self.exhausted:
            causes = "".join(f"\n  | {name}: {cause}" for name, cause in self._causes.items())
            problem = f"all {len(self.members)} rollout workers are lost, so nothing can be sampled.{causes}"
            for handle in self.handles:
                handle.close(NoRolloutWorkerLeft(problem))
        else:
            self.handles.remove(member.handle)
            member.handle.close()


def _answered(of_ranks: Mapping[int, T | ClusterError]) -> list[T]:
    return [answer for answer in of_ranks.values() if not isinstance(answer, ClusterError)]


async def _cancel(*tasks: asyncio.Task[None] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _reuse(of_engines: Sequence[EngineStats]) -> dict[str, float]:
    """What engines did not compute token by token, where they say so."""
    metrics = {}
    if cached := sum(one.cached_tokens for one in of_engines):
        metrics["generation/prompt_cached"] = cached / (cached + sum(one.prompt_tokens for one in of_engines))
    if drafted := sum(one.drafted_tokens for one in of_engines):
        metrics["generation/drafts_accepted"] = sum(one.accepted_tokens for one in of_engines) / drafted
    return metrics


def _set_if(event: asyncio.Event, condition: bool) -> None:
    if condition:
        event.set()
    else:
        event.clear()


def _live(name: str, state: ReplicaState, health: EngineHealth | ClusterError | None) -> LiveEngine:
    engine = LiveEngine(name, state.state, state.cause)
    if not isinstance(health, EngineHealth):
        return engine
    names = "version", "running", "waiting", "seconds_since_step"
    return replace(engine, **{name: getattr(health, name) for name in names})


def hanging(health: EngineHealth, step_seconds: float) -> str | None:
    """Why an engine that answers is lost nevertheless; None if it is not."""
    busy = health.running + health.waiting > 0 and not health.paused
    if not busy or health.seconds_since_step <= step_seconds:
        return None
    return (
        f"no step for {health.seconds_since_step:.0f} s, while {health.running} sequences run and "
        f"{health.waiting} wait (cluster.deadlines.engine_step is {step_seconds:g})"
    )
