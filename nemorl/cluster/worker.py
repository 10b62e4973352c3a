"""One process of a group as its callers see it: calls, their answers and errors, what the process does."""

import asyncio
import math
import os
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from .activity import ProcessReport, process_state
from .actor import Invocation
from .errors import ClusterError, DeadlineExceeded, NodeLost, WorkerDied, WorkerFailed
from .logs import last_lines, process_of
from .nodes import Home

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
# Between two wake-ups for answers of long calls: for the square of the number of results that are awaited
# (10 ms for a hundred, a second for a thousand), and at most. A worker answers the next call with all that
# has ended by then, so that thousands of results take fewer calls, and the last ones are not late.
_ARRIVAL_SECONDS = 1e-6
_MAX_ARRIVAL_SECONDS = 3.0
MAX_SPANS = 100_000  # that are kept if they are not taken, as in a server


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

    async def stream(self, method: str, *args: Any, stage: str, seconds: float) -> AsyncGenerator[Any, None]:
        """Items of an async generator of the worker as they come; `seconds` limit the wait for each.

        Raises like `call`. Closing the iterator early (`contextlib.aclosing`) cancels the generator in the
        worker.
        """
        invocation = Invocation(self.prefix + method, stage, seconds)
        items = self.actor.stream.options(num_returns="streaming").remote(invocation, *args)
        running = True
        try:
            while True:
                async with asyncio.timeout(seconds):
                    item = await (await anext(items))
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

    async def call_pair(
        self, method: str, *args: Any, stage: str, seconds: float, num_awaited: int = 1
    ) -> tuple[ray.ObjectRef, Any]:
        """Call a method that returns two values; the first, which may be large, comes as a reference.

        This process owns it. `num_awaited` is for `Arrivals.answer`. Raises like `call`.
        """
        invocation = Invocation(self.prefix + method, stage, seconds)
        # As one argument, since Ray serializes each of several separately, a good part of a call's time.
        first, second = self.actor.call_pair.remote((invocation, args))
        try:
            async with asyncio.timeout(seconds):
                return first, await _arrivals_of(asyncio.get_running_loop()).answer(second, num_awaited)
        except RayError as error:
            raise await resolve_error(self, stage, error) from None
        except TimeoutError:
            where = str((await describe_activity([self]))[0])
            raise DeadlineExceeded(self.group, (self.rank,), stage, seconds, (where,)) from None

    def send(self, method: str, *args: Any, stage: str) -> None:
        """Call without an answer; only the log of the worker has a failure."""
        self.actor.call.remote(Invocation(self.prefix + method, stage, math.inf), *args)

    async def ended(self) -> None:
        """Return when the process has ended, or cannot be reached."""
        with suppress(RayError):
            await self.actor.wait_forever.remote()


class Arrivals:
    """Answers of long calls. Belongs to one event loop, which wakes up for several of them at a time.

    To wake up for one costs most of a millisecond, whatever it is. The time between two wake-ups grows with
    the square of what is awaited.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._num_awaited = loop, 0
        self._arrived: deque[tuple[asyncio.Future[Future[Any]], Future[Any], int]] = deque()
        self._wakes = False  # for what has arrived
        self._last = -math.inf  # time of the last wake-up

    async def answer(self, reference: ray.ObjectRef, num_awaited: int = 1) -> Any:
        """The answer, or its error, soon after it has come; it may hold `num_awaited` results."""
        self._num_awaited += num_awaited
        taken = self._loop.create_future()
        reference.future().add_done_callback(partial(self._arrive, taken, num_awaited))
        return (await taken).result()

    def _arrive(self, taken: asyncio.Future[Future[Any]], num_awaited: int, answer: Future[Any]) -> None:
        """Called in a thread of Ray."""
        self._arrived.append((taken, answer, num_awaited))
        if not self._wakes and not self._loop.is_closed():
            self._wakes = True
            self._loop.call_soon_threadsafe(self._wake_up)

    def _wake_up(self) -> None:
        interval = min(_MAX_ARRIVAL_SECONDS, self._num_awaited**2 * _ARRIVAL_SECONDS)
        if (left := self._last + interval - self._loop.time()) > 0:
            self._loop.call_later(left, self._wake_up)
            return
        self._last, self._wakes = self._loop.time(), False
        while self._arrived:
            taken, answer, num_awaited = self._arrived.popleft()
            self._num_awaited -= num_awaited
            if not taken.done():  # else its caller was cancelled
                taken.set_result(answer)


_arrivals_of = lru_cache(maxsize=1)(Arrivals)


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


async def silent_and_dead(
    workers: Sequence[Worker], seconds: float
) -> tuple[list[Worker], list[tuple[Worker, RayActorError]]]:
    """Those that do not respond within `seconds`, and those that have ended, with Ray's error.

    One that computes responds.
    """
    asked = {asyncio.wrap_future(w.actor.respond.remote().future()): w for w in workers}
    done, silent = await asyncio.wait(asked, timeout=seconds)
    for future in silent:
        future.cancel()
    ended = ((asked[future], future.exception()) for future in done)
    dead = [(worker, error) for worker, error in ended if isinstance(error, RayActorError)]
    return [asked[future] for future in silent], dead


async def outcomes(workers: Sequence[Worker], invocation: Invocation, args: Sequence[Any]) -> dict[int, Any]:
    """Of each rank its answer, or the ClusterError in its place."""
    method, stage, seconds = invocation.method, invocation.stage, invocation.deadline_seconds
    calls = (worker.call(method, *args, stage=stage, seconds=seconds) for worker in workers)
    found = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in found:
        if isinstance(outcome, BaseException) and not isinstance(outcome, ClusterError):
            raise outcome
    return {worker.rank: outcome for worker, outcome in zip(workers, found, strict=True)}


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
        state = process_state(pid) if pid and host == os.uname().nodename else None
        report = ProcessReport(worker.group, worker.rank, str(worker.log), pid, host, state=state)
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
