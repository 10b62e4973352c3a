"""The driver of engines that sample request by request, as serving engines do.

submit ──▶ one task per request ──▶ gate (closed while paused) ──▶ engine.sample ──▶ chunks ──▶ reports
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from nemorl.config.generation import OnUpdate
from nemorl.trajectories import Int16Array, StopReason
from nemorl.weights.messages import RefitDeadline, RefitFailed

from .front import DRAIN_SHARE, EngineFront, PauseMode, ReportStream
from .tokens import TokenBuffer
from .types import EngineFailed, EngineHealth, EngineStats, GenerationRequest, Refusal, RequestRefused

_RESUME_SECONDS = 5.0  # to resume an engine that could not be paused
_Switch = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Chunk:
    """What an engine sampled for one request since its last chunk, as in `Progress`. `n` tokens."""

    tokens: Sequence[int]  # [n]
    logprobs: Sequence[float]  # [n]
    versions: Sequence[int]  # [n]
    stop: StopReason | None = None  # of the last chunk
    routed_experts: Int16Array | None = None


class AsyncEngine(Protocol):
    """An engine as `RequestDriver` requires it."""

    @property
    def version(self) -> int: ...

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestRefused for a request that can never be served."""

    def sample(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks until one has a stop reason. Closing the generator early ends the request."""

    async def freeze(self) -> None:
        """Pause between two steps; sequences in flight stay in the engine."""

    async def thaw(self) -> None: ...


class PauseLock:
    """Keeps an engine paused while anyone holds it. Belongs to one event loop."""

    def __init__(self, freeze: _Switch, thaw: _Switch, fail: Callable[[Exception], None]) -> None:
        """`fail` is called for an engine that cannot be resumed."""
        self._freeze, self._thaw, self._fail = freeze, thaw, fail
        self.holders: set[object] = set()  # the engine is paused or pausing while there are any
        self._switching = asyncio.Lock()  # held while the engine pauses or resumes
        self.paused = asyncio.Event()

    async def acquire(self, holder: object) -> None:
        """Return when the engine is paused, until `release`. If this is cancelled first, it resumes."""
        self.holders.add(holder)
        try:
            await self._settle()
        except BaseException:
            self.holders.discard(holder)
            if self.paused.is_set():  # other holders may have released it meanwhile
                await self._settle()
            raise

    async def release(self, holder: object) -> None:
        """Return when the engine has resumed, or is paused for other holders only."""
        if holder in self.holders:
            self.holders.discard(holder)
            await self._settle()

    async def _settle(self) -> None:
        async with self._switching:
            if self.holders and not self.paused.is_set():
                try:
                    await self._freeze()
                except BaseException:  # also if the caller was cancelled
                    with suppress(Exception):  # `fail` has been called with it
                        await self._resume(_RESUME_SECONDS)
                    raise
                self.paused.set()
            elif not self.holders and self.paused.is_set():
                await self._resume(None)
                self.paused.clear()

    async def _resume(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds) as limit:
                await self._thaw()
        except Exception as error:
            stuck = TimeoutError("the engine did not pause and could not be resumed")
            self._fail(stuck if limit.expired() else error)
            raise


@dataclass(eq=False)
class _Sequence:
    request: GenerationRequest
    stream: ReportStream
    sampled: TokenBuffer = field(default_factory=TokenBuffer)
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[StopReason] = field(init=False)  # answers the request when it has ended
    deadline: asyncio.Timeout | None = None  # once its task runs
    restarts: bool = False  # its task was cancelled to continue with what is left of the request
    stop: StopReason | None = None  # once the engine has ended it


class RequestDriver(EngineFront):
    """Runs every request as a task over an `AsyncEngine`. Belongs to one event loop."""

    def __init__(self, engine: AsyncEngine, name: str) -> None:
        self._engine, self.name = engine, name
        self._sequences: dict[str, _Sequence] = {}
        self._running: set[str] = set()  # ids that have passed the gate
        self._gate, self._idle = asyncio.Event(), asyncio.Event()  # requests may start; nothing runs
        self._gate.set()
        self._idle.set()
        self._paused = False
        self._num_blocks = 0  # of `paused`
        self._suspension = AsyncExitStack()
        self._seconds_left: dict[_Sequence, float] | None = None  # of each deadline, while suspended
        self._lock = PauseLock(engine.freeze, self._thaw, self.fail)
        self._failure: EngineFailed | None = None
        self.corruption: str | None = None  # in `health` until `recover`; who sets it pauses the engine
        self._last_chunk = time.monotonic()
        self._stats = EngineStats()
        self._stats_since: float | None = None  # the first request
        self._busy_since = 0.0  # while requests run

    @property
    def version(self) -> int:
        return self._engine.version

    async def submit(self, requests: Sequence[GenerationRequest], stream: ReportStream) -> None:
        if self._failure is not None:
            raise self._failure
        for request in requests:
            self._engine.check(request)
            if request.id in self._sequences:
                raise RequestRefused(f"request {request.id!r} is in flight already; ids must be unique")
        for request in requests:
            sequence = self._sequences[request.id] = _Sequence(request, stream)
            sequence.task = asyncio.create_task(self._sample(sequence))
            sequence.task.add_done_callback(partial(self._finish, sequence))

    async def abandon(self, stream: ReportStream) -> None:
        ending = [sequence.task for sequence in self._sequences.values() if sequence.stream is stream]
        for task in ending:
            task.cancel()
        if ending and self._failure is None:  # a failed engine may never end them
            await asyncio.wait(ending)

    async def abort(self, request_ids: Sequence[str]) -> None:
        ending = [self._sequences[name].task for name in request_ids if name in self._sequences]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def pause(self, mode: PauseMode) -> None:
        self._paused = True
        self._set_gate()
        if mode == "wait":
            await first_of(self._idle, self._gate)  # a resume ends the wait
        elif mode == "abort":
            await self.abort(list(self._sequences))
        else:
            await self._lock.acquire(self)

    async def resume(self) -> None:
        self._paused = False
        try:
            await self._lock.release(self)
        finally:
            self._set_gate()

    async def suspend(self) -> None:
        """Pause until `revive` with an engine that has no sequence and may forget its KV cache.

        Sequences continue from the tokens that they have, and their deadlines wait.
        """
        if self._seconds_left is None:
            now = asyncio.get_running_loop().time()
            self._seconds_left = {}
            for sequence, deadline in self._deadlines():
                if (end := deadline.when()) is not None:
                    self._seconds_left[sequence] = end - now
                    deadline.reschedule(None)
            await self._suspension.enter_async_context(self.paused(drain_seconds=0.0))

    async def revive(self) -> None:
        """Sample again after `suspend`, if it was called."""
        await self._suspension.aclose()
        left, self._seconds_left = self._seconds_left, None
        if left is not None:
            now = asyncio.get_running_loop().time()
            for sequence, deadline in self._deadlines():
                deadline.reschedule(now + left.get(sequence, sequence.request.deadline_seconds))

    def _deadlines(self) -> Iterator[tuple[_Sequence, asyncio.Timeout]]:
        """Those that can still be changed."""
        for sequence in self._sequences.values():
            deadline = sequence.deadline
            if deadline is not None and not sequence.task.done() and not deadline.expired():
                yield sequence, deadline

    @asynccontextmanager
    async def paused(self, *, drain_seconds: float | None = None) -> AsyncIterator[None]:
        """No step runs in the block; blocks may overlap.

        Sequences stay frozen in the engine. With `drain_seconds` they leave it: what does not end within that
        time continues after the block from the tokens that it has.
        """
        self._num_blocks += 1
        self._set_gate()
        try:
            if drain_seconds is not None:  # sequences that another holder has frozen do not end
                await first_of(self._idle, self._lock.paused, seconds=drain_seconds)
                self._restart_running()
                await self._idle.wait()
            holder = object()
            await self._lock.acquire(holder)
            try:
                yield
            finally:
                await self._lock.release(holder)
        finally:
            self._num_blocks -= 1
            self._set_gate()

    @asynccontextmanager
    async def paused_for(self, version: int, on_update: OnUpdate, *, seconds: float) -> AsyncIterator[None]:
        """`paused`, for an update to `version`. Raises RefitDeadline unless it begins within `seconds`."""
        drain_seconds = DRAIN_SHARE * seconds if on_update == "finish" else None
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(seconds):
                    await stack.enter_async_context(self.paused(drain_seconds=drain_seconds))
            except TimeoutError as error:
                late = f"{self.name} did not pause within {seconds:g} s (cluster.deadlines.refit)"
                raise RefitDeadline(f"refit to version {version}: {late}") from error
            yield

    def fail(self, error: Exception) -> None:
        """Answer all requests with an error, and new ones too until `recover`."""
        if not isinstance(error, EngineFailed):
            failure = EngineFailed(f"{self.name} has ended: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        self._failure = error
        for sequence in list(self._sequences.values()):
            sequence.stream.put([], error)
            sequence.task.cancel()

    def fail_update(self, version: int, error: Exception) -> RefitFailed:
        """Fail because the weights may be corrupt; return the error to raise for the refit."""
        problem = f"{self.name} may have corrupt weights: it did not complete the update to version {version}"
        self.fail(EngineFailed(f"{problem}: {error}"))
        return RefitFailed(f"refit to version {version}: {error}; {problem}")

    def recover(self) -> None:
        """Serve again after a failure or corrupt weights."""
        self._failure = self.corruption = None

    async def stats(self) -> EngineStats:
        now = time.monotonic()
        self._count_busy(now)
        self._stats.seconds = now - (self._stats_since or now)
        self._stats_since = None if self._stats_since is None else now
        done, self._stats = self._stats, EngineStats()
        return done

    def health(self) -> EngineHealth:
        if self._failure is not None:
            raise self._failure
        return EngineHealth(
            version=self.version,
            running=len(self._running),
            waiting=len(self._sequences) - len(self._running),
            paused=self._paused or bool(self._lock.holders),
            seconds_since_step=time.monotonic() - self._last_chunk if self._running else 0.0,
            corruption=self.corruption,
            queued=sum(len(sequence.sampled) == 0 for sequence in self._sequences.values()),
        )

    def _finish(self, sequence: _Sequence, task: asyncio.Task[StopReason]) -> None:
        name, error = sequence.request.id, None if task.cancelled() else task.exception()
        if isinstance(error, RequestRefused):
            sequence.stream.put([Refusal(name, str(error))])  # as servers do
        elif error:
            self.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        else:
            stop = StopReason.ABORT if task.cancelled() else task.result()
            sequence.stream.put([sequence.sampled.complete(name, stop, time.monotonic() - sequence.began)])
        del self._sequences[name]
        self._leave(name)

    def _leave(self, name: str) -> None:
        self._count_busy(time.monotonic())
        self._running.discard(name)
        if not self._running:
            self._idle.set()

    def _restart_running(self) -> None:
        """Take the running sequences out of the engine; they enter again when the gate opens."""
        for name in self._running:
            sequence = self._sequences[name]
            sequence.restarts = sequence.task.cancel()

    async def _sample(self, sequence: _Sequence) -> StopReason:
        try:
            seconds = sequence.request.deadline_seconds if self._seconds_left is None else None
            async with asyncio.timeout(seconds) as deadline:
                sequence.deadline = deadline
                while sequence.stop is None:
                    await self._gate.wait()
                    try:
                        await self._follow(sequence)
                    except asyncio.CancelledError:
                        # Another cancellation is an abort, or the deadline.
                        if not sequence.restarts or sequence.task.uncancel():
                            raise
                        sequence.restarts = False
                        self._leave(sequence.request.id)
                return sequence.stop
        except TimeoutError:
            if not deadline.expired():
                raise
            return StopReason.ABORT

    async def _follow(self, sequence: _Sequence) -> None:
        """Take what the engine samples for what is left of a request, to its end."""
        sampled, request = sequence.sampled, sequence.sampled.remaining(sequence.request)
        if not self._running:
            self._last_chunk = self._busy_since = time.monotonic()  # an idle engine does not hang
            self._stats_since = self._stats_since or self._busy_since
        self._running.add(request.id)
        self._idle.clear()
        self._stats.prompt_tokens += len(request.prompt)
        async with aclosing(self._engine.sample(request)) as chunks:
            async for chunk in chunks:
                sampled.extend(chunk.tokens, chunk.logprobs, chunk.versions, chunk.routed_experts)
                self._stats.tokens_generated += len(chunk.tokens)
                self._last_chunk = time.monotonic()
                if chunk.stop is not None:
                    sequence.stop = chunk.stop
                    return
                if 0 < request.progress_tokens <= sampled.num_unreported:
                    sequence.stream.put([sampled.take_progress(request.id)])
        raise EngineFailed(f"{self.name} ended request {request.id!r} without a stop reason")

    def _count_busy(self, now: float) -> None:
        if self._running:
            self._stats.busy_seconds += now - self._busy_since
            self._busy_since = now

    async def _thaw(self) -> None:
        self._last_chunk = time.monotonic()  # nor does a paused one
        await self._engine.thaw()
        self._last_chunk = time.monotonic()

    def _set_gate(self) -> None:
        if self._paused or self._num_blocks:
            self._gate.clear()
        else:
            self._gate.set()


async def first_of(*events: asyncio.Event, seconds: float | None = None) -> None:
    """Return when one of them is set, or after `seconds`."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
