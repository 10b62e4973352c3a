"""Groups of worker processes that are called as one.

    WorkerGroup ─▶ Worker of each rank ─▶ [Ray] Actor ─▶ its target

Each call has a stage and a deadline, and its errors name the rank and the cause.
"""

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemorl.config.policy import LayoutConfig

from .activity import end_stopped
from .actor import Actor, Identity, Invocation, TableEntries, with_references
from .errors import (
    ClusterError,
    DeadlineExceeded,
    GroupEnded,
    RelayLost,
    WorkerDied,
    WorkerHung,
)
from .logs import log_path, process_of
from .nodes import Home, lost_nodes
from .placement import ExtraRanks, Placement, Seat, await_places
from .worker import (
    VERDICT_SECONDS,
    BusySpans,
    Pending,
    Worker,
    answers,
    describe_activity,
    outcomes,
    resolve_error,
    silent_and_dead,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# By which the answer of a relay may come later than the deadline of its workers: it describes what is late.
RELAY_SECONDS = VERDICT_SECONDS + 10.0
# A call of Ray costs the driver about a millisecond, so that it makes one for many ranks of a large group.
MIN_RELAYED = 64  # ranks
FAN_OUT = 64  # ranks that a relay calls
_MAX_PARTS = 32  # that a relay keeps
_MAX_CALLS = 100_000  # at a time of a concurrent worker; the others would wait, health checks too
# Ray sends SIGKILL to a process that has not ended 5 s after `ray.kill`.
KILL_SECONDS = 10.0


@dataclass(frozen=True)
class Mesh:
    """Ranks in Megatron's order tp-cp-ep-dp-pp: TP ranks are adjacent, stages farthest apart."""

    same_share: int = 1  # adjacent ranks of a stage that get the same share of the batch: tp and cp
    data: int = 1
    pipeline: int = 1

    @classmethod
    def of(cls, layout: LayoutConfig) -> "Mesh":
        same_share = layout.tensor_parallel_size * layout.context_parallel_size
        return cls(same_share, layout.data_parallel_size, layout.pipeline_parallel_size)

    @property
    def world_size(self) -> int:
        return self.same_share * self.data * self.pipeline

    def dp_rank(self, rank: int) -> int:
        """Share of the batch that the rank trains on."""
        return rank // self.same_share % self.data

    @property
    def output_ranks(self) -> tuple[int, ...]:
        """One rank for each share of the batch, in order: the first that has it, of the last stage."""
        return tuple(range(self.world_size - self.same_share * self.data, self.world_size, self.same_share))

    def spread(self, shards: Sequence[T]) -> list[T]:
        """For every rank its DP rank's shard."""
        if len(shards) != self.data:
            raise ValueError(f"{len(shards)} shards for a data-parallel size of {self.data}: give as many.")
        return [shards[self.dp_rank(rank)] for rank in range(self.world_size)]


# Starts the process of a rank and has it make its target; returns it with a reference to its GPUs.
Launch = Callable[[int, Seat, Invocation], tuple[Worker, ray.ObjectRef]]
# Called with a deadline's error and the workers of the group, before their processes are ended.
OnDeadline = Callable[[DeadlineExceeded, Sequence[Worker]], Awaitable[None]]


class WorkerGroup:
    """Ranks of one kind. A call runs on every rank (SPMD) and gives one answer for each.

    A failed call ends the processes of the whole group, unless it says otherwise: its ranks may hang in a
    collective operation that can no longer complete. Later calls raise `GroupEnded`. With `health_seconds`,
    a process that does not respond during a call is found within twice that time. Relays call the ranks of a
    large group; those of a lost relay are called by the others, or directly if it was the last.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[Worker],
        mesh: Mesh,
        launch: Launch | None = None,
        on_deadline: OnDeadline | None = None,
        relays: Sequence[Worker] = (),
        start_relays: Callable[[], Awaitable[list[Worker]]] | None = None,
        health_seconds: float | None = None,
    ) -> None:
        self.name, self.workers, self.mesh = name, tuple(workers), mesh
        self._relays, self._start_relays = tuple(relays), start_relays
        self._divided: Sequence[Worker] = ()  # the workers in these parts, of `FAN_OUT` each
        self._parts: list[ray.ObjectRef] = []
        self._on_deadline, self._health_seconds = on_deadline, health_seconds
        self.num_restarts = 0  # of all processes together
        self.gpus: list[tuple[str, ...]] = []  # of each rank, as CUDA_VISIBLE_DEVICES names them
        self.spans = BusySpans()  # of calls that were awaited, without those in the background
        self._launch, self._ended = launch, ""  # why its processes ended, if they did
        self._has_lost = False  # and whether one of them had died or hung
        self._placement: Placement | None = None
        self._kwargs: Sequence[Mapping[str, Any]] = ()  # of the ranks that it began with
        self._of_place: Callable[[int], Mapping[str, Any]] = lambda rank: {}
        self._extra: ExtraRanks | None = None  # that may be added
        self._unanswered: set[ray.ObjectRef] = set()  # of calls that failed, were cancelled or still run

    @classmethod
    async def start(
        cls,
        name: str,
        target: str,
        per_rank_kwargs: Sequence[Mapping[str, Any]],
        *,
        placement: Placement,
        threads: int,
        run_dir: Path,
        deadline_seconds: float,
        mesh: Mesh | None = None,
        concurrent: bool = False,
        environment: Mapping[str, str] | None = None,
        on_deadline: OnDeadline | None = None,
        health_seconds: float | None = None,
        of_place: Callable[[int], Mapping[str, Any]] = lambda rank: {},
        extra: ExtraRanks | None = None,
    ) -> "WorkerGroup":
        """Start a process for every entry of `per_rank_kwargs` and make `target(**kwargs)` in it.

        `target` is an import path such as `nemorl.megatron.worker:PolicyWorker`, `threads` are each process's
        CPU threads. The mesh is data-parallel when not given. `concurrent` targets run in an event loop.
        `of_place` are further arguments, which may differ when a rank is started again on another node.
        `extra` ranks can be started later.
        """
        ranks = len(per_rank_kwargs)
        mesh = mesh or Mesh(data=ranks)
        if mesh.world_size != ranks:
            raise ValueError(f"{ranks} ranks for a mesh of {mesh.world_size}: give as many.")
        # Set before the process imports anything: the libraries read them when they are loaded.
        libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        variables = {**dict.fromkeys(libraries, str(threads)), "PYTHONFAULTHANDLER": "1"}
        variables |= {**placement.environment, **(environment or {})}

        def launch(rank: int, seat: Seat, invocation: Invocation) -> tuple[Worker, ray.ObjectRef]:
            options = {"runtime_env": {"env_vars": dict(variables)}, **seat.options}
            worker = start_worker(name, rank, run_dir, seat.home, concurrent=concurrent, **options)
            return worker, worker.actor.make.remote(invocation, target, **seat.kwargs)

        invocation = Invocation("make", f"start {name}", deadline_seconds)
        start_relays = partial(_start_relays, name, placement, run_dir, invocation)
        group = cls(
            name, (), mesh, launch, on_deadline, start_relays=start_relays, health_seconds=health_seconds
        )
        group._placement, group._extra = placement, extra
        group._kwargs, group._of_place = per_rank_kwargs, of_place
        await group._launch_all(invocation, {})
        return group

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    def kill(self, *workers: Worker) -> None:
        """End processes, also those that do not respond; calls of them fail, those that run too."""
        for worker in workers:
            ray.kill(worker.actor)
        here = [pid for worker in workers if (pid := _local_process(worker)) is not None]
        check = threading.Timer(KILL_SECONDS, end_stopped, (here,))
        check.daemon = True
        check.start()

    def drop(self, worker: Worker) -> None:
        """End one process of a group whose ranks do not need each other."""
        if self.mesh.world_size != self.mesh.data:
            raise ValueError(f"the ranks of {self.name} work together: none can be dropped")
        self.kill(worker)
        self.workers = tuple(w for w in self.workers if w is not worker)
        self.mesh = Mesh(data=len(self.workers))

    async def restart(self, rank: int, deadline_seconds: float) -> Worker:
        """Start a dropped rank again, or an extra one as soon as it has a place; `admit` adds it to calls.

        Raises PlacementFailed, and like `Worker.call`.
        """
        assert self._launch is not None, "a group of given workers has nothing to start more with"
        if rank < len(self._kwargs):
            seat = self._seat(rank, {})
        else:
            assert self._extra is not None, "the group has no extra ranks"
            seat = await self._extra.seat(rank)
        invocation = Invocation("make", f"restart {self.name}", deadline_seconds)
        worker, reference = self._launch(rank, seat, invocation)
        try:
            await answers({reference: worker}, invocation)
        except BaseException:
            self.kill(worker)
            raise
        return worker

    def release(self, rank: int) -> None:
        """Free the place of an extra rank whose process has been ended."""
        if self._extra is not None:
            self._extra.release(rank)

    def waits_for_place(self, rank: int) -> bool:
        return rank >= len(self._kwargs) and self.extra_node(rank) is None

    def extra_node(self, rank: int) -> str | None:
        """ID of the node of an extra rank that has a place."""
        return self._extra.node(rank) if self._extra is not None else None

    async def lost_one(self, seconds: float) -> bool:
        """True if a process or its node is lost, or it does not respond within `seconds`."""
        if self._ended:
            return self._has_lost
        if self.has_lost_node:
            return True
        silent, dead = await silent_and_dead(self.workers, seconds)
        # After this it is known whether a node of theirs is lost too.
        await asyncio.gather(*(resolve_error(worker, "health check", error) for worker, error in dead))
        return bool(silent) or bool(dead)

    async def replace_all(self, deadline_seconds: float, **changed: Any) -> None:
        """End all processes and start others in their places, their targets made with `changed` arguments.

        Raises like `call`.
        """
        assert self._launch is not None, "a group of given workers has nothing to start more with"
        self._end(self._ended or "its processes are being replaced")
        self._has_lost = True  # until all of them are there; it can be tried again
        await self._launch_all(Invocation("make", f"restart {self.name}", deadline_seconds), changed)
        self._ended, self._has_lost = "", False
        self.num_restarts += 1

    async def _launch_all(self, invocation: Invocation, changed: Mapping[str, Any]) -> None:
        assert self._launch is not None, "a group of given workers has nothing to start more with"
        seats = [self._seat(rank, changed) for rank in range(len(self._kwargs))]
        launched = [self._launch(rank, seat, invocation) for rank, seat in enumerate(seats)]
        self.workers, self._unanswered = tuple(worker for worker, _ in launched), set()
        if self._start_relays is not None:
            self._relays = tuple(await self._start_relays())
        self.gpus = await self._answers({reference: worker for worker, reference in launched}, invocation)

    @property
    def _of_run(self) -> Placement:
        assert self._placement is not None, "a group of given workers has no places"
        return self._placement

    def _seat(self, rank: int, changed: Mapping[str, Any]) -> Seat:
        """The present place of a rank that the group began with."""
        kwargs = {**self._kwargs[rank], **self._of_place(rank), **changed}
        return Seat(kwargs, self._of_run.options(self.name, rank), self._of_run.home(self.name, rank))

    @property
    def has_lost_node(self) -> bool:
        return bool(self._of_lost_nodes())

    def _of_lost_nodes(self) -> list[Worker]:
        lost = lost_nodes({worker.home.node for worker in self.workers if worker.home is not None})
        return [worker for worker in self.workers if worker.home is not None and worker.home.node in lost]

    async def await_places(self, seconds: float) -> None:
        """Wait until all ranks have places on nodes that are not lost. Raises `NodeNotReplaced`."""
        if self._placement is not None:
            await await_places(self._placement, self.name, range(len(self._kwargs)), seconds)

    @property
    def num_left(self) -> int:
        """Ranks whose node is not lost."""
        return len(self._of_run.ranks_left(self.name))

    @property
    def shares_places(self) -> bool:
        """True if other processes have places with those of the group."""
        return self._of_run.shares_places(self.name)

    def shrink(self, mesh: Mesh) -> None:
        """Have fewer ranks after the next `replace_all`, in places that are left."""
        self._of_run.shrink(self.name, mesh.world_size)
        self._kwargs, self.mesh = self._kwargs[: mesh.world_size], mesh

    async def await_place(self, rank: int) -> None:
        """Wait, without limit, until a rank that the group began with has such a place."""
        if self._placement is not None and rank < len(self._kwargs):
            await await_places(self._placement, self.name, [rank])

    def admit(self, worker: Worker) -> None:
        self.workers = tuple(sorted([*self.workers, worker], key=lambda w: w.rank))
        self.mesh = Mesh(data=len(self.workers))

    async def call(
        self,
        method: str,
        *args: Any,
        stage: str,
        seconds: float,
        shards: Sequence[Any] | None = None,
        axis: Literal["dp", "rank"] = "dp",
        resolve: bool = False,
        outputs: Literal["all", "output_ranks", "first"] = "all",
        keep: str = "",
        background: bool = False,
        ends_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a method on every rank and wait for all.

        `shards` are separate first arguments: one for each data-parallel rank, or with `axis="rank"` for each
        rank. `resolve` replaces object references inside the arguments by their values (arguments themselves
        always are). `outputs` chooses whose answers are returned: of all ranks, of one for each data-parallel
        rank (`Mesh.output_ranks`), or of the first rank where all are equal. With `keep` the answers stay in
        the workers' object stores until the next ones under this name, and references to them are returned;
        an answer that is None is returned itself. A method in the `background` runs while other calls run.
        Raises `WorkerFailed`, `WorkerDied`, `WorkerHung` or `DeadlineExceeded`, and `GroupEnded` after one
        of them; `ends_group=False` is for a method whose failure leaves every rank usable.
        """
        if self._ended:
            raise GroupEnded(f"{self.name} cannot run '{method}' in stage '{stage}': {self._ended}.")
        if shards is None:
            of_ranks = [args] * len(self.workers)
        else:
            if axis == "dp":
                # One copy in the object store for ranks that share it; a relay gets one anyway.
                if self.mesh.same_share > 1 and not self._relays:
                    shards = [ray.put(shard) for shard in shards]
                shards = self.mesh.spread(shards)
            elif (ranks := len(self.workers)) != len(shards):
                raise ValueError(f"{len(shards)} shards for {ranks} ranks of {self.name}: give as many.")
            of_ranks = [(shard, *args) for shard in shards]
        invocation = Invocation(method, stage, seconds, resolve, background, keep)
        returned: Sequence[int] = range(len(self.workers))
        if outputs != "all":
            returned = (0,) if outputs == "first" else self.mesh.output_ranks
        if self._relays:
            common = [args] if shards is None else of_ranks
            answering = self._call_relays(invocation, common, kwargs, returned, ends_group)
            return await self._unless_hung(answering, stage)
        pending = _begin_calls(self.workers, invocation, of_ranks, kwargs)
        everything = await self._unless_hung(self._answers(pending, invocation, ends_group), stage)
        return [everything[place] for place in returned]

    def tabulate(self, of_shards: Sequence[Sequence[ray.ObjectRef]]) -> Sequence[Any]:
        """Stand-ins for these references, for shards of a call with `resolve`.

        In a large group each is sent once to every relay whose ranks read it, not once for each rank.
        """
        if not self._relays:
            return of_shards
        entries = list[TableEntries]()
        size = max(1, FAN_OUT // self.mesh.same_share)  # shards of the ranks of a relay
        for first in range(0, len(of_shards), size):
            part = of_shards[first : first + size]
            distinct = dict.fromkeys(itertools.chain(*part))
            numbers = {reference: number for number, reference in enumerate(distinct)}
            table = ray.put([*distinct])
            entries += (TableEntries(table, tuple(map(numbers.__getitem__, of_shard))) for of_shard in part)
        return entries

    async def ask(self, method: str, *args: Any, stage: str, seconds: float) -> dict[int, Any]:
        """Of each rank its answer, or the ClusterError in its place, with which nothing else ends.

        For methods that may run twice: the ranks of a lost relay are asked again.
        """
        invocation, workers = Invocation(method, stage, seconds), self.workers
        asked: dict[int, Any] = {}
        for of_relay in await self._ask_relays("ask", invocation, args):
            asked |= of_relay
        left = [worker for worker in workers if worker.rank not in asked]
        return asked | await outcomes(left, invocation, args)

    async def _ask_relays(self, method: str, invocation: Invocation, args: tuple[Any, ...] = ()) -> list[Any]:
        """The answers of the relays; those that are lost are not called again."""
        calls = self._begin_relayed(method, invocation, lambda first: args) if self._relays else {}
        waits = (answers({call: relay}, _relayed(invocation)) for call, relay in calls.items())
        found = await asyncio.gather(*waits, return_exceptions=True)
        of_relays = []
        for relay, answer in zip(calls.values(), found, strict=True):
            if isinstance(answer, ClusterError):
                self._bypass(relay, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                of_relays.append(answer[0])
        return of_relays

    async def _call_relays(
        self,
        invocation: Invocation,
        of_ranks: Sequence[tuple[Any, ...]],
        kwargs: Mapping[str, Any],
        returned: Sequence[int],
        ends_group: bool,
    ) -> list[Any]:
        """The answers of some ranks; `of_ranks` has one entry for all where there is only one."""

        def of_part(first: int) -> tuple[Any, ...]:
            own = of_ranks[first : first + FAN_OUT] if len(of_ranks) > 1 else of_ranks
            return own, kwargs, [place - first for place in returned if first <= place < first + FAN_OUT]

        calls = self._begin_relayed("call", invocation, of_part)
        try:
            parts = await self._answers(calls, _relayed(invocation), ends_group)
        except (WorkerDied, DeadlineExceeded) as error:
            ranks = error.ranks if isinstance(error, DeadlineExceeded) else (error.rank,)
            lost = [relay for relay in calls.values() if relay.group == error.group and relay.rank in ranks]
            for relay in lost:
                self._bypass(relay, error)
            if lost and not self._ended:
                raise RelayLost(
                    f"{self.name} did not complete stage '{invocation.stage}': {error}"
                ) from error
            raise
        return [answer for part in parts for answer in part]

    def _begin_relayed(
        self, method: str, invocation: Invocation, of_part: Callable[[int], tuple[Any, ...]]
    ) -> dict[ray.ObjectRef, Worker]:
        """Call a method of `Relay` for each part of the ranks, with further arguments by its first rank."""
        starts = range(0, len(self.workers), FAN_OUT)
        if self._divided is not self.workers:
            # Relays read them from the object store, since handles of workers are costly to send.
            self._parts = [ray.put(self.workers[first : first + FAN_OUT]) for first in starts]
            self._divided = self.workers
        outer, calls = _relayed(invocation, method), {}
        for number, (first, part) in enumerate(zip(starts, self._parts, strict=True)):
            relay = self._relays[number % len(self._relays)]
            calls[relay.actor.call.remote(outer, [part], invocation, *of_part(first))] = relay
        return calls

    def _bypass(self, relay: Worker, error: ClusterError) -> None:
        """Call the ranks of a lost relay without it."""
        if relay in self._relays:
            logger.warning("the ranks of %s are called without relay %d: %s", self.name, relay.rank, error)
            self._relays = tuple(other for other in self._relays if other is not relay)
            self.kill(relay)

    async def _unless_hung(self, answering: Coroutine[Any, Any, list[Any]], stage: str) -> list[Any]:
        """The answers. Raises `WorkerHung`, and ends the group, if a process does not respond meanwhile."""
        if (seconds := self._health_seconds) is None:
            return await answering
        task, workers = asyncio.create_task(answering), self.workers
        try:
            while not (await asyncio.wait({task}, timeout=seconds))[0]:
                silent = await self._silent(workers, seconds)
                if silent and not task.done() and not self._ended:
                    raise await self._end_hung(silent, stage, seconds)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _silent(self, workers: Sequence[Worker], seconds: float) -> list[Worker]:
        """Those that do not respond; a call reports those that have died, and those of a lost node."""
        if self._relays:
            asked = await self._ask_relays("silent", Invocation("respond", "health check", seconds))
            ranks = set(itertools.chain(*asked))
            silent = [worker for worker in workers if worker.rank in ranks]
        else:
            silent, _ = await silent_and_dead(workers, seconds)
        return [worker for worker in silent if worker.home is None or not worker.home.is_lost()]

    async def _end_hung(self, silent: Sequence[Worker], stage: str, seconds: float) -> WorkerHung:
        ranks, processes = tuple(worker.rank for worker in silent), (*self.workers, *self._relays)
        self._has_lost, self._ended = True, f"its processes were ended: rank {ranks[0]} hung"
        try:
            where = tuple(map(str, await describe_activity(silent)))
            error = WorkerHung(self.name, ranks, stage, seconds, where)
            if self._on_deadline is not None:
                await self._on_deadline(error, self.workers)
        finally:
            self.kill(*processes)  # not those that replace them, if another call failed meanwhile
        return error

    async def shutdown(self, deadline_seconds: float = 10.0, *, after: BaseException | None = None) -> None:
        """End the processes after calling `close` on every worker that has it, unless a call is under way.

        `after` is the error that ended the work, if any; a death that it reports is not logged again.
        """
        if self._ended:
            return
        # After the failure of one rank the others may have answered long ago.
        if calls := list(self._unanswered):
            _, running = ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)
            self._unanswered = set(running)
        if not self._unanswered:
            invocation = Invocation("close", f"shutdown {self.name}", deadline_seconds)
            lost = self._of_lost_nodes()  # which is known
            left = [worker for worker in self.workers if worker not in lost]
            try:
                await self._answers({w.actor.close.remote(invocation): w for w in left}, invocation)
            except ClusterError as error:
                if not (isinstance(error, WorkerDied) and error.is_reported_in(after)):
                    logger.warning("%s", error)
        self._end("it was shut down")

    async def _answers(self, pending: Pending, invocation: Invocation, ends_group: bool = True) -> list[Any]:
        if not invocation.background:  # a method there waits for no other rank
            self._unanswered |= pending.keys()
        try:
            with nullcontext() if invocation.background else self.spans.busy():
                everything = await answers(pending, invocation)
        except ClusterError as error:
            if isinstance(error, DeadlineExceeded) and self._on_deadline is not None:
                await self._on_deadline(error, self.workers)
            if ends_group and not invocation.background:
                self._has_lost |= isinstance(error, WorkerDied | DeadlineExceeded)
                self._end(f"its processes were ended after this failure: {str(error).splitlines()[0]}")
            raise
        self._unanswered -= pending.keys()
        return everything

    def _end(self, reason: str) -> None:
        self._ended = reason
        self.kill(*self.workers, *self._relays)


def start_worker(
    group: str, rank: int, run_dir: Path, home: Home | None, *, concurrent: bool, **options: Any
) -> Worker:
    """Start an actor with these options of Ray, in which nothing is made yet."""
    log = log_path(run_dir.absolute(), group, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    actor_class: Any = Actor  # which Ray has wrapped
    if concurrent:
        options["max_concurrency"] = _MAX_CALLS
    started = actor_class.options(max_restarts=0, **options)
    actor = started.remote(Identity(group, rank, log, Path.cwd()), concurrent=concurrent)
    return Worker(group, rank, log, actor, home)


def _begin_calls(
    workers: Sequence[Worker],
    invocation: Invocation,
    of_ranks: Sequence[Sequence[Any]],
    kwargs: Mapping[str, Any],
) -> Pending:
    calls = zip(workers, of_ranks, strict=True)
    return {worker.actor.call.remote(invocation, *own, **kwargs): worker for worker, own in calls}


class Relay:
    """Calls parts of a large group for the driver, from a process of its own."""

    def __init__(self) -> None:
        self._parts: dict[ray.ObjectRef, Sequence[Worker]] = {}  # the last ones

    async def call(
        self,
        part: Sequence[ray.ObjectRef],
        invocation: Invocation,
        of_ranks: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any],
        returned: Sequence[int],
    ) -> list[Any]:
        """The answers of workers at these places; `of_ranks` may have one entry for all.

        Raises as `answers`.
        """
        workers = await self._workers(*part)
        if invocation.resolve:  # once for all of them
            of_ranks = await with_references(list(of_ranks))
        arguments = of_ranks if len(of_ranks) > 1 else [*of_ranks] * len(workers)
        everything = await answers(_begin_calls(workers, invocation, arguments, kwargs), invocation)
        return [everything[place] for place in returned]

    async def ask(self, part: Sequence[ray.ObjectRef], invocation: Invocation, *args: Any) -> dict[int, Any]:
        return await outcomes(await self._workers(*part), invocation, args)

    async def silent(self, part: Sequence[ray.ObjectRef], invocation: Invocation) -> list[int]:
        """Ranks that do not respond before the deadline."""
        silent, _ = await silent_and_dead(await self._workers(*part), invocation.deadline_seconds)
        return [worker.rank for worker in silent]

    async def _workers(self, part: ray.ObjectRef) -> Sequence[Worker]:
        if part not in self._parts:
            workers = await part
            for old in [*self._parts][: len(self._parts) - _MAX_PARTS]:
                del self._parts[old]
            self._parts[part] = workers
        return self._parts[part]


async def _start_relays(
    name: str, placement: Placement, run_dir: Path, invocation: Invocation
) -> list[Worker]:
    """Relays for a group of many ranks, each on the node of the first rank that it calls; else none."""
    relays, made, ranks = [], [], len(placement.nodes[name])
    for number, first in enumerate(range(0, ranks, FAN_OUT) if ranks >= MIN_RELAYED else ()):
        home = placement.home(name, first)
        node = NodeAffinitySchedulingStrategy(placement.nodes[name][first].id, soft=True)
        options = {"num_cpus": 0, "scheduling_strategy": node}
        relay = start_worker(f"{name}-relay", number, run_dir, home, concurrent=True, **options)
        relays.append(relay)
        made.append(relay.actor.make.remote(invocation, f"{__name__}:{Relay.__name__}"))
    if made:
        await answers(dict(zip(made, relays, strict=True)), invocation)
    return relays


def _relayed(invocation: Invocation, method: str = "") -> Invocation:
    """The call of a relay that makes this one."""
    seconds = invocation.deadline_seconds + RELAY_SECONDS
    return replace(invocation, method=method, deadline_seconds=seconds, resolve=False, keep="")


def _local_process(worker: Worker) -> int | None:
    """ID of the process that last wrote to the worker's log, if it is on this machine."""
    pid, host = process_of(worker.log) or (None, "")
    return pid if host == os.uname().nodename else None
