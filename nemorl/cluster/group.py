"""Groups of worker processes that are called as one.

    WorkerGroup ─▶ Worker of each rank ─▶ [Ray] Actor ─▶ its target

Each call has a stage and a deadline, and its errors name the rank and the cause.
"""

import asyncio
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemorl.config.policy import LayoutConfig

from .activity import ProcessReport, process_state
from .actor import Actor, Identity, Invocation
from .errors import ClusterError, DeadlineExceeded, GroupEnded, NodeLost, WorkerDied, WorkerFailed
from .logs import last_lines, log_path, process_of
from .nodes import Home
from .placement import Placement

logger = logging.getLogger(__name__)

T = TypeVar("T")
Pending = Mapping[ray.ObjectRef, "Worker"]  # answers that are awaited

# For other ranks to answer after a first failure: peers of a dead rank raise before Ray reports the death.
GRACE_SECONDS = 2.0
# Across nodes: Ray reports a broken connection to a lost node only after this time.
GRACE_SECONDS_APART = 8.0
# Ray then needs about 15 s to decide that the node is lost and not only the connection.
VERDICT_SECONDS = 40.0
_POLL_SECONDS = 0.5
ACTIVITY_SECONDS = 3.0
# By which the answer of a relay may come later than the deadline of its workers: it describes what is late.
RELAY_SECONDS = VERDICT_SECONDS + 10.0
# A call of Ray costs the driver about a millisecond, so that it makes one for many ranks of a large group.
MIN_RELAYED = 64  # ranks
FAN_OUT = 32  # ranks that a relay calls
MAX_SPANS = 100_000  # that are kept if they are not taken, as in a server


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


@dataclass(frozen=True)
class Worker:
    """Handle of one process of a group. It can be passed to other workers, which then call it themselves."""

    group: str
    rank: int
    log: Path
    actor: Any  # Ray's handle of an `Actor`
    home: Home | None = None  # in a run over several nodes
    prefix: str = ""  # of the methods: `attribute.` for those of an attribute of the target

    async def call(self, method: str, *args: Any, stage: str, seconds: float) -> Any:
        """Raises `WorkerFailed`, `WorkerDied` or `DeadlineExceeded`; the worker is left as it is."""
        invocation = Invocation(self.prefix + method, stage, seconds)
        return (await answers({self.actor.call.remote(invocation, *args): self}, invocation))[0]

    async def stream(
        self, method: str, *args: Any, stage: str, seconds: float = math.inf, pairs: bool = False
    ) -> AsyncGenerator[Any, None]:
        """Items of an async generator of the worker as they come; `seconds` limit the wait for each.

        With `pairs` its items are taken two by two: the first, which may be large, comes as a reference that
        this process owns. Raises like `call`. Closing the iterator early (`contextlib.aclosing`) cancels the
        generator in the worker.
        """
        invocation = Invocation(self.prefix + method, stage, seconds)
        items = self.actor.stream.options(num_returns="streaming").remote(invocation, *args)
        running = True
        try:
            while True:
                async with asyncio.timeout(seconds):
                    reference = await anext(items)
                    try:
                        item = (reference, await (await anext(items))) if pairs else await reference
                    except StopAsyncIteration:
                        await reference  # a generator that fails ends with its error as the last item
                        raise
                yield item
        except StopAsyncIteration:
            running = False
        except RayError as error:
            running = False
            raise await resolve_error(self, stage, error) from None
        except TimeoutError:
            where = str((await describe_activity([self]))[0])
            raise DeadlineExceeded(self.group, (self.rank,), stage, seconds, (where,)) from None
        finally:
            if running:
                ray.cancel(items)

    async def ended(self) -> None:
        """Return when the process has ended, or cannot be reached."""
        with suppress(RayError):
            await self.actor.wait_forever.remote()


Span = tuple[float, float]  # begin and end, in seconds of `time.perf_counter`


class BusySpans:
    """When calls were under way. Belongs to one event loop."""

    def __init__(self) -> None:
        self._ended: deque[Span] = deque(maxlen=MAX_SPANS)
        self._begun: dict[object, float] = {}  # of calls under way

    @contextmanager
    def busy(self) -> Iterator[None]:
        call = object()
        self._begun[call] = time.perf_counter()
        try:
            yield
        finally:
            self._ended.append((self._begun.pop(call), time.perf_counter()))

    def take(self, now: float) -> list[Span]:
        """Spans since the last call of this; a call under way is split at `now`."""
        spans = [*self._ended, *((begin, now) for begin in self._begun.values())]
        self._ended.clear()
        self._begun = dict.fromkeys(self._begun, now)
        return spans


# Starts the process of a rank and has it make its target, with changes of the group's arguments; returns it
# with a reference to its GPUs.
Launch = Callable[[int, Invocation, Mapping[str, Any]], tuple[Worker, ray.ObjectRef]]
# Called with a deadline's error and the workers of the group, before their processes are ended.
OnDeadline = Callable[[DeadlineExceeded, Sequence[Worker]], Awaitable[None]]


class WorkerGroup:
    """Ranks of one kind. A call runs on every rank (SPMD) and gives one answer for each.

    A failed call ends the processes of the whole group, unless it says otherwise: its ranks may hang in a
    collective operation that can no longer complete. Later calls raise `GroupEnded`. Relays call the ranks of
    a large group.
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
    ) -> None:
        self.name, self.workers, self.mesh = name, tuple(workers), mesh
        self._relays, self._start_relays = relays, start_relays
        self._relayed: Sequence[Worker] = ()  # the workers that the relays know
        self._on_deadline = on_deadline
        self.gpus: list[tuple[str, ...]] = []  # of each rank, as CUDA_VISIBLE_DEVICES names them
        self.spans = BusySpans()  # of calls that were awaited, without those in the background
        self._launch, self._ended = launch, ""  # why its processes ended, if they did
        self._has_lost = False  # and whether one of them had died or hung
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
    ) -> "WorkerGroup":
        """Start a process for every entry of `per_rank_kwargs` and make `target(**kwargs)` in it.

        `target` is an import path such as `nemorl.megatron.worker:PolicyWorker`, `threads` are each process's
        CPU threads. The mesh is data-parallel when not given. `concurrent` targets run in an event loop.
        """
        ranks = len(per_rank_kwargs)
        mesh = mesh or Mesh(data=ranks)
        if mesh.world_size != ranks:
            raise ValueError(f"{ranks} ranks for a mesh of {mesh.world_size}: give as many.")
        # Set before the process imports anything: the libraries read them when they are loaded.
        libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        variables = {**dict.fromkeys(libraries, str(threads)), "PYTHONFAULTHANDLER": "1"}
        variables |= {**placement.environment, **(environment or {})}

        def launch(
            rank: int, invocation: Invocation, changed: Mapping[str, Any]
        ) -> tuple[Worker, ray.ObjectRef]:
            log = log_path(run_dir.absolute(), name, rank)
            log.parent.mkdir(parents=True, exist_ok=True)
            actor_class: Any = Actor  # which Ray has wrapped
            actor = actor_class.options(
                runtime_env={"env_vars": dict(variables)}, max_restarts=0, **placement.options(name, rank)
            ).remote(Identity(name, rank, log, Path.cwd()), concurrent=concurrent)
            worker = Worker(name, rank, log, actor, placement.home(name, rank))
            return worker, actor.make.remote(invocation, target, **{**per_rank_kwargs[rank], **changed})

        invocation = Invocation("make", f"start {name}", deadline_seconds)
        launched = [launch(rank, invocation, {}) for rank in range(ranks)]
        start_relays = partial(_start_relays, name, ranks, placement, run_dir, invocation)
        relays, workers = await start_relays(), [worker for worker, _ in launched]
        group = cls(name, workers, mesh, launch, on_deadline, relays, start_relays)
        group.gpus = await group._answers({reference: worker for worker, reference in launched}, invocation)
        return group

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    def kill(self, worker: Worker) -> None:
        """End one process, even one that does not respond; calls of it fail, those that run too."""
        ray.kill(worker.actor)

    def drop(self, worker: Worker) -> None:
        """End one process of a group whose ranks do not need each other."""
        if self.mesh.world_size != self.mesh.data:
            raise ValueError(f"the ranks of {self.name} work together: none can be dropped")
        self.kill(worker)
        self.workers = tuple(w for w in self.workers if w is not worker)
        self.mesh = Mesh(data=len(self.workers))

    async def restart(self, rank: int, deadline_seconds: float) -> Worker:
        """Start a dropped rank again; `admit` adds it to calls. Raises like `Worker.call`."""
        assert self._launch is not None, "a group of given workers has nothing to start more with"
        invocation = Invocation("make", f"restart {self.name}", deadline_seconds)
        worker, reference = self._launch(rank, invocation, {})
        try:
            await answers({reference: worker}, invocation)
        except BaseException:
            self.kill(worker)
            raise
        return worker

    async def lost_one(self, seconds: float) -> bool:
        """True if a process has died, or does not respond within `seconds`."""
        if self._ended:
            return self._has_lost
        asked = [asyncio.wrap_future(w.actor.respond.remote().future()) for w in self.workers]
        _, silent = await asyncio.wait(asked, timeout=seconds)
        for future in silent:
            future.cancel()
        return bool(silent) or any(isinstance(future.exception(), RayActorError) for future in asked)

    async def replace_all(self, deadline_seconds: float, **changed: Any) -> None:
        """End all processes and start others in their places, their targets made with `changed` arguments.

        Raises like `call`.
        """
        assert self._launch is not None, "a group of given workers has nothing to start more with"
        self._end(self._ended or "its processes are being replaced")
        if self._relays and self._start_relays is not None:
            self._relays = await self._start_relays()
        invocation = Invocation("make", f"restart {self.name}", deadline_seconds)
        launched = [self._launch(worker.rank, invocation, changed) for worker in self.workers]
        self.workers, self._unanswered = tuple(worker for worker, _ in launched), set()
        self.gpus = await self._answers({reference: worker for worker, reference in launched}, invocation)
        self._ended = ""

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
        outputs: Literal["all", "output_ranks"] = "all",
        keep: str = "",
        background: bool = False,
        ends_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a method on every rank and wait for all.

        `shards` are separate first arguments: one for each data-parallel rank, or with `axis="rank"` for each
        rank. `resolve` replaces object references inside the arguments by their values (arguments themselves
        always are). `outputs` chooses whose answers are returned: of all ranks, or of one for each
        data-parallel rank (`Mesh.output_ranks`). With `keep` the answers stay in the workers' object stores
        until the next ones under this name, and references to them are returned; an answer that is None is
        returned itself. A method in the `background` runs while other calls run. Raises `WorkerFailed`,
        `WorkerDied` or `DeadlineExceeded`, and `GroupEnded` after one of them; `ends_group=False` is for a
        method whose failure leaves every rank usable.
        """
        if self._ended:
            raise GroupEnded(f"{self.name} cannot run '{method}' in stage '{stage}': {self._ended}.")
        if shards is None:
            of_ranks = [args] * len(self.workers)
        else:
            if axis == "dp":
                if self.mesh.same_share > 1:  # one copy in the object store for ranks that share it
                    shards = [ray.put(shard) for shard in shards]
                shards = self.mesh.spread(shards)
            elif (ranks := len(self.workers)) != len(shards):
                raise ValueError(f"{len(shards)} shards for {ranks} ranks of {self.name}: give as many.")
            of_ranks = [(shard, *args) for shard in shards]
        invocation = Invocation(method, stage, seconds, resolve, background, keep)
        if self._relays:
            common = [args] if shards is None else of_ranks
            everything = await self._call_relays(invocation, common, kwargs, ends_group)
        else:
            calls = zip(self.workers, of_ranks, strict=True)
            pending = {worker.actor.call.remote(invocation, *own, **kwargs): worker for worker, own in calls}
            everything = await self._answers(pending, invocation, ends_group)
        return everything if outputs == "all" else [everything[rank] for rank in self.mesh.output_ranks]

    async def _call_relays(
        self,
        invocation: Invocation,
        of_ranks: Sequence[tuple[Any, ...]],
        kwargs: Mapping[str, Any],
        ends_group: bool,
    ) -> list[Any]:
        """The answers of all ranks; `of_ranks` has one entry for all where there is only one."""
        starts = range(0, len(self.workers), FAN_OUT)
        relays = [self._relays[number % len(self._relays)] for number in range(len(starts))]
        outer = replace(
            invocation,
            method="connect",
            deadline_seconds=invocation.deadline_seconds + RELAY_SECONDS,
            resolve=False,
            keep="",
        )
        if self._relayed is not self.workers:
            known = self.workers
            parts = zip(relays, starts, strict=True)
            calls = {r.actor.call.remote(outer, n, known[n : n + FAN_OUT]): r for r, n in parts}
            await self._answers(calls, outer, ends_group)
            self._relayed = known
        outer, calls = replace(outer, method="call"), {}
        for relay, first in zip(relays, starts, strict=True):
            own = of_ranks[first : first + FAN_OUT] if len(of_ranks) > 1 else of_ranks
            calls[relay.actor.call.remote(outer, first, invocation, own, kwargs)] = relay
        return [answer for part in await self._answers(calls, outer, ends_group) for answer in part]

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
            try:
                await self._answers({w.actor.close.remote(invocation): w for w in self.workers}, invocation)
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
                self._has_lost = isinstance(error, WorkerDied | DeadlineExceeded)
                self._end(f"its processes were ended after this failure: {str(error).splitlines()[0]}")
            raise
        self._unanswered -= pending.keys()
        return everything

    def _end(self, reason: str) -> None:
        self._ended = reason
        for worker in (*self.workers, *self._relays):
            self.kill(worker)


class Relay:
    """Calls parts of a large group for the driver, from a process of its own."""

    def __init__(self) -> None:
        self._parts: dict[int, Sequence[Worker]] = {}  # by the place of their first worker

    async def connect(self, first: int, workers: Sequence[Worker]) -> None:
        self._parts[first] = workers

    async def call(
        self, first: int, invocation: Invocation, of_ranks: Sequence[Sequence[Any]], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """The answers in the order of the workers; `of_ranks` may have one entry for all.

        Raises as `answers`.
        """
        workers = self._parts[first]
        arguments = of_ranks if len(of_ranks) > 1 else [*of_ranks] * len(workers)
        calls = zip(workers, arguments, strict=True)
        pending = {worker.actor.call.remote(invocation, *own, **kwargs): worker for worker, own in calls}
        return await answers(pending, invocation)


async def _start_relays(
    name: str, ranks: int, placement: Placement, run_dir: Path, invocation: Invocation
) -> list[Worker]:
    """Relays for a group of many ranks, each on the node of the first rank that it calls; else none."""
    relays, made = [], []
    for number, first in enumerate(range(0, ranks, FAN_OUT) if ranks >= MIN_RELAYED else ()):
        group = f"{name}-relay"
        log = log_path(run_dir.absolute(), group, number)
        log.parent.mkdir(parents=True, exist_ok=True)
        node = NodeAffinitySchedulingStrategy(placement.nodes[name][first].id, soft=True)
        actor_class: Any = Actor  # which Ray has wrapped
        actor = actor_class.options(num_cpus=0, max_restarts=0, scheduling_strategy=node).remote(
            Identity(group, number, log, Path.cwd()), concurrent=True
        )
        relays.append(Worker(group, number, log, actor, placement.home(name, first)))
        made.append(actor.make.remote(invocation, f"{__name__}:{Relay.__name__}"))
    if made:
        await answers(dict(zip(made, relays, strict=True)), invocation)
    return relays


async def answers(pending: Pending, invocation: Invocation) -> list[Any]:
    """Return the answers in the order of `pending`. Raises the first failure, or `DeadlineExceeded`."""
    stage, seconds = invocation.stage, invocation.deadline_seconds
    futures = {asyncio.wrap_future(reference.future()): worker for reference, worker in pending.items()}
    end = time.monotonic() + seconds
    waiting: set[asyncio.Future[Any]] = set(futures)
    failed: list[asyncio.Future[Any]] = []
    try:
        while waiting:
            left = max(0.0, end - time.monotonic())
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            had_failures = bool(failed)
            failed += [future for future in done if future.exception() is not None]
            if failed and not had_failures:
                apart = any(worker.home is not None for worker in pending.values())
                end = min(end, time.monotonic() + (GRACE_SECONDS_APART if apart else GRACE_SECONDS))
    finally:
        for future in waiting:
            future.cancel()
    if failed:
        errors = [await resolve_error(futures[future], stage, future.exception()) for future in failed]
        # A lost node explains the deaths of its processes, and a death the errors of its peers.
        raise next(e for kind in (NodeLost, WorkerDied, ClusterError) for e in errors if isinstance(e, kind))
    if waiting:
        late = [worker for future, worker in futures.items() if future in waiting]
        where = tuple(map(str, await describe_activity(late)))
        raise DeadlineExceeded(late[0].group, tuple(w.rank for w in late), stage, seconds, where)
    return [future.result() for future in futures]


async def describe_activity(workers: Sequence[Worker]) -> list[ProcessReport]:
    """Describe what each worker does, and write its stacks to its log.

    One that does not answer within `ACTIVITY_SECONDS` is described from outside, if it is on this machine.
    """
    asked = [asyncio.wrap_future(worker.actor.describe_activity.remote().future()) for worker in workers]
    if asked:
        await asyncio.wait(asked, timeout=ACTIVITY_SECONDS)
    reports = []
    for future, worker in zip(asked, workers, strict=True):
        pid, host = process_of(worker.log) or (None, "")
        here = pid is not None and host == os.uname().nodename
        report = ProcessReport(worker.group, worker.rank, str(worker.log), pid, host)
        report = replace(report, state=process_state(pid) if pid and here else None)
        if not future.done():
            future.cancel()
        elif (error := future.exception()) is not None:
            report = replace(report, error=str(typed_error(worker, "describe_activity", error)))
        else:
            report = replace(report, activity=future.result())
        reports.append(report)
    return reports


async def resolve_error(worker: Worker, stage: str, error: BaseException | None) -> ClusterError:
    """Return `typed_error`; for an unreachable worker, first wait for Ray to decide if its node is lost."""
    if isinstance(error, ActorUnavailableError) and worker.home is not None:
        end = time.monotonic() + VERDICT_SECONDS
        while not worker.home.is_lost() and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)
    return typed_error(worker, stage, error)


def typed_error(worker: Worker, stage: str, error: BaseException | None) -> ClusterError:
    """Convert an error of Ray to a `ClusterError`, without Ray's traceback."""
    who, log, home = (worker.group, worker.rank, stage), worker.log, worker.home
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, ClusterError):
            return error.cause
        kind = f"{type(error.cause).__module__}.{type(error.cause).__qualname__}"
        return WorkerFailed(*who, kind, _one_line(str(error.cause)), log)
    if isinstance(error, RayActorError):
        if home is not None and home.is_lost():
            return NodeLost(*who, home.name, str(home), log)
        found = re.search(r"Worker exit detail: (.*)", str(error), re.DOTALL)
        reason = _one_line(found[1] if found else str(error))
        if "connection error code 2" in reason:  # all that Ray reports of a closed socket
            reason = "the process vanished: it crashed, was killed, or the machine ran out of memory"
        elif "killed by `ray.kill`" in reason:
            reason = "the driver ended its process and reports the reason"
        return WorkerDied(*who, reason, log, last_lines(log), home.name if home else "")
    if isinstance(error, RayError):
        return WorkerFailed(*who, f"ray.{type(error).__qualname__}", _one_line(str(error)), log)
    raise TypeError(f"not an error of Ray: {error!r}")


def _one_line(text: str) -> str:
    return " ".join(text.split())
