"""A generation worker over an engine that samples by itself, request by request, as serving engines do.

generate_batches ──▶ one task per request ──▶ gate (shut while paused) ──▶ backend.sample ──▶ chunks
                 ◀── progress and completions of all requests of the call, as they come

The bookkeeping of `AsyncEngineWorker`: a request that is under way, and what was done.

Standing still between two steps, for whoever wants it and only as long.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from nemorl.trajectories import Float32Array, Int16Array, Int32Array, StopReason
from nemorl.weights.session import RefitDeadline, RefitFailed

from .engine_thread import PauseMode
from .types import (
    Completion,
    EngineFailed,
    EngineHealth,
    EngineStats,
    GenerationRequest,
    Progress,
    Refusal,
    Report,
    RequestRefused,
)


@dataclass(eq=False)
class OpenRequest:
    """A request that has not been answered."""

    request: GenerationRequest
    reports: asyncio.Queue[Report | Exception]  # of its call
    task: asyncio.Task[StopReason] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed_experts: list[Int16Array] = field(default_factory=list)  # rows of each chunk
    num_told: int = 0  # tokens that progress has reported
    _chunks_told: int = 0  # of experts

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, last: bool
    ) -> None:
        """Keep what was sampled, and report progress where it is due."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions
        every = self.request.progress_tokens
        if not last and every and len(self.tokens) - self.num_told >= every:
            arrays, experts = self._arrays(self.num_told), self._experts(self._chunks_told)
            self.reports.put_nowait(Progress(self.request.id, *arrays, experts))
            self.num_told, self._chunks_told = len(self.tokens), len(self.routed_experts)

    def end(self, stop: StopReason) -> None:
        """Answer with what there is."""
        seconds = time.monotonic() - self._began
        arrays, experts = self._arrays(0), self._experts(0)
        self.reports.put_nowait(Completion(self.request.id, *arrays, stop, seconds, experts))

    def refuse(self, reason: str) -> None:
        """Answer that it cannot be served; others are not concerned."""
        self.reports.put_nowait(Refusal(self.request.id, reason))

    def abort(self) -> None:
        """Stop sampling; it is answered when its task has ended."""
        if self.task is not None:
            self.task.cancel()

    def _experts(self, first: int) -> Int16Array | None:
        """Rows of the chunks from `first` on."""
        new = self.routed_experts[first:]
        return np.concatenate(new) if new else None

    def _arrays(self, first: int) -> tuple[Int32Array, Float32Array, Int32Array]:
        return (
            np.array(self.tokens[first:], np.int32),
            np.array(self.logprobs[first:], np.float32),
            np.array(self.versions[first:], np.int32),
        )


@dataclass
class Metrics:
    """What was done since they were last asked for."""

    peak: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    seconds_busy: float = 0.0
    _counted: float = field(default_factory=time.monotonic)

    def count(self, num_running: int) -> None:
        """Let the time until now be busy if anything ran."""
        now = time.monotonic()
        self.seconds_busy += (now - self._counted) if num_running else 0.0
        self._counted = now


# That going on may take an engine which could not be brought to a stand.
_GRACE_SECONDS = 5.0


class Stand:
    """Whether an engine stands: from the first who wants it to the last. Belongs to one event loop."""

    def __init__(
        self,
        freeze: Callable[[], Awaitable[None]],
        thaw: Callable[[], Awaitable[None]],
        fail: Callable[[Exception], None],
    ) -> None:
        """`fail` hears of an engine that does not go on."""
        self._freeze, self._thaw, self._fail = freeze, thaw, fail
        self._holders: set[object] = set()  # who wants it to stand
        self._turning = asyncio.Lock()  # held while it comes to a stand or goes on
        self.still = asyncio.Event()  # it has come to a stand

    @property
    def wanted(self) -> bool:
        """Whether it stands, or is coming to a stand."""
        return bool(self._holders)

    async def hold(self, who: object) -> None:
        """Return when it stands, until `release`. If it does not come to a stand in time it goes on."""
        self._holders.add(who)
        try:
            await self._settle()
        except BaseException:
            self._holders.discard(who)
            if self.still.is_set():  # others may have gone meanwhile
                await self._settle()
            raise

    async def release(self, who: object) -> None:
        """Return when it goes on, or stands for others only."""
        if who in self._holders:
            self._holders.discard(who)
            await self._settle()

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """It stands while the block runs."""
        who = object()
        await self.hold(who)
        try:
            yield
        finally:
            await self.release(who)

    async def _settle(self) -> None:
        async with self._turning:
            if self.wanted and not self.still.is_set():
                try:
                    await self._freeze()
                except BaseException:  # also where nobody waits any longer
                    with suppress(Exception):  # which `fail` has heard of
                        await self._go_on(_GRACE_SECONDS)
                    raise
                self.still.set()
            elif not self.wanted and self.still.is_set():
                await self._go_on(None)
                self.still.clear()

    async def _go_on(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds) as limit:
                await self._thaw()
        except Exception as error:
            neither = TimeoutError("it came to no stand, and does not go on either")
            self._fail(neither if limit.expired() else error)
            raise


@dataclass(frozen=True)
class Chunk:
    """What an engine sampled for one request since its last chunk. `n` tokens."""

    tokens: Sequence[int]  # [n]
    logprobs: Sequence[float]  # [n] of the distribution sampled
    versions: Sequence[int]  # [n] weights that sampled each
    stop: StopReason | None = None  # of the last chunk
    routed_experts: Int16Array | None = None  # rows that are new; see `Completion`


class AsyncBackend(Protocol):
    """An engine as `AsyncEngineWorker` needs it."""

    @property
    def version(self) -> int:
        """The version of the weights that sample."""
        ...

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestRefused for what can never be served."""
        ...

    def sample(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks until one says why it is the last. Closing the generator early ends the request."""
        ...

    async def freeze(self) -> None:
        """Stand still between two steps, sequences in flight keep their places."""
        ...

    async def thaw(self) -> None:
        """Step again."""
        ...


class AsyncEngineWorker:
    """What callers know as `GenerationWorker`, over an `AsyncBackend`. Belongs to one event loop."""

    def __init__(self, backend: AsyncBackend, name: str) -> None:
        """`name` is what errors call the engine."""
        self._backend = backend
        self._name = name
        self._sequences: dict[str, OpenRequest] = {}
        self._running: set[str] = set()  # of them those that have passed the gate
        self._gate = asyncio.Event()
        self._gate.set()
        self._paused = False
        self._num_standing = 0  # blocks of `standing`
        self._standstill = Stand(backend.freeze, self._thaw, self.fail)
        self._idle = asyncio.Event()  # nothing runs
        self._idle.set()
        self._failure: EngineFailed | None = None
        self._torn: str | None = None
        self._last_chunk = time.monotonic()
        self._metrics = Metrics()

    @property
    def version(self) -> int:
        """The version of the weights that sample."""
        return self._backend.version

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Completion, None]:
        """Completions as they finish, one by one; see `generate_batches`. Every refusal is raised."""
        async with aclosing(self.generate_batches(requests)) as batches:
            async for batch in batches:
                for report in batch:
                    if isinstance(report, Refusal):
                        raise RequestRefused(report.reason)
                    if isinstance(report, Completion):
                        yield report

    async def generate_batches(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[Sequence[Report], None]:
        """What there is to tell since the last item: completions, refusals, and progress where it is wanted.

        Raises RequestRefused, before any of them begins, if one can never be served, and EngineFailed if the
        engine dies. A caller that stops reading ends what is left.
        """
        if self._failure is not None:
            raise self._failure
        for request in requests:
            self._backend.check(request)
            if request.id in self._sequences:
                raise RequestRefused(f"request {request.id!r} is in flight already; ids must be unique")
        reports: asyncio.Queue[Report | Exception] = asyncio.Queue()
        own = [OpenRequest(request, reports) for request in requests]
        for sequence in own:
            self._sequences[sequence.request.id] = sequence
            sequence.task = asyncio.create_task(self._sample(sequence))
            sequence.task.add_done_callback(partial(self._finish, sequence))
        unanswered = len(own)
        try:
            while unanswered:
                batch, error = await _all_there(reports)
                unanswered -= sum(not isinstance(report, Progress) for report in batch)
                if batch:
                    yield batch
                if error is not None:
                    raise error
        finally:
            left = [one for one in own if self._sequences.get(one.request.id) is one]
            for sequence in left:
                sequence.abort()
            ending = [sequence.task for sequence in left if sequence.task]
            if ending and self._failure is None:  # a dead engine may end nothing
                await asyncio.wait(ending)  # then their ids may be used again

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; those in flight are answered with what they have and stop reason `abort`."""
        ended = [self._sequences[name] for name in request_ids if name in self._sequences]
        for sequence in ended:
            sequence.abort()
        await asyncio.gather(*(sequence.task for sequence in ended if sequence.task), return_exceptions=True)

    async def pause(self, mode: PauseMode) -> None:
        """Return when no step runs or will run; requests that arrive meanwhile wait for `resume`."""
        self._paused = True
        self._set_gate()
        if mode == "wait":
            await _first_of(self._idle, self._gate)  # after a resume it would be pointless
        elif mode == "abort":
            await self.abort(list(self._sequences))
        else:
            await self._standstill.hold(self)

    async def resume(self) -> None:
        """Go on sampling."""
        self._paused = False
        try:
            await self._standstill.release(self)
        finally:
            self._set_gate()

    @asynccontextmanager
    async def standing(self, *, drain: bool) -> AsyncIterator[None]:
        """While the block runs no step does: sequences in flight have ended (`drain`) or keep their places.

        A worker that was paused before stays so after it. Blocks may overlap.
        """
        self._num_standing += 1
        self._set_gate()
        try:
            if drain:  # what others hold still keeps its place
                await _first_of(self._idle, self._standstill.still)
            async with self._standstill.holding():
                yield
        finally:
            self._num_standing -= 1
            self._set_gate()

    def fail(self, error: Exception) -> None:
        """Answer whoever waits with an error, and who comes, until `recover`."""
        if not isinstance(error, EngineFailed):
            failure = EngineFailed(f"{self._name} has ended: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        self._failure = error
        for sequence in list(self._sequences.values()):
            sequence.reports.put_nowait(error)
            sequence.abort()

    def mark_torn(self, reason: str) -> None:
        """Tell by `health` that the weights are of no version. The caller lets it stand until `recover`."""
        self._torn = reason

    def recover(self) -> None:
        """Serve again: what had failed or was torn has been mended."""
        self._failure = None
        self._torn = None

    async def stats(self) -> EngineStats:
        """What was done since the last call."""
        done, self._metrics = self._metrics, Metrics(peak=len(self._running))
        done.count(len(self._running))
        return EngineStats(
            version=self.version,
            tokens_generated=done.tokens,
            prompt_tokens=done.prompt_tokens,
            seconds_busy=done.seconds_busy,
            peak_batch=done.peak,
        )

    def health(self) -> EngineHealth:
        """Where the engine stands. Raises EngineFailed, with its cause, if it answers nothing."""
        if self._failure is not None:
            raise self._failure
        return EngineHealth(
            version=self.version,
            running=len(self._running),
            waiting=len(self._sequences) - len(self._running),
            paused=self._paused or self._standstill.wanted,
            seconds_since_step=time.monotonic() - self._last_chunk if self._running else 0.0,
            torn=self._torn,
        )

    def _finish(self, sequence: OpenRequest, task: asyncio.Task[StopReason]) -> None:
        """Answer a request whose task has ended."""
        if task.cancelled():
            sequence.end(StopReason.ABORT)
        elif isinstance(error := task.exception(), RequestRefused):
            sequence.refuse(str(error))  # as servers do
        elif error:
            self.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        else:
            sequence.end(task.result())
        self._metrics.count(len(self._running))
        del self._sequences[sequence.request.id]
        self._running.discard(sequence.request.id)
        if not self._running:
            self._idle.set()

    async def _sample(self, sequence: OpenRequest) -> StopReason:
        request = sequence.request
        try:
            async with asyncio.timeout(request.deadline_seconds) as deadline:
                await self._gate.wait()
                self._enter(request)
                async with aclosing(self._backend.sample(request)) as chunks:
                    async for chunk in chunks:
                        if chunk.routed_experts is not None:
                            sequence.routed_experts.append(chunk.routed_experts)
                        sequence.take(
                            chunk.tokens, chunk.logprobs, chunk.versions, last=chunk.stop is not None
                        )
                        self._metrics.tokens += len(chunk.tokens)
                        self._last_chunk = time.monotonic()
                        if chunk.stop is not None:
                            return chunk.stop
        except TimeoutError:
            if not deadline.expired():
                raise
            return StopReason.ABORT
        raise EngineFailed(f"{self._name} ended request {request.id!r} without saying why")

    def _enter(self, request: GenerationRequest) -> None:
        self._metrics.count(len(self._running))
        if not self._running:
            self._last_chunk = time.monotonic()  # rest is no hanging
        self._running.add(request.id)
        self._idle.clear()
        self._metrics.prompt_tokens += len(request.prompt)
        self._metrics.peak = max(self._metrics.peak, len(self._running))

    async def _thaw(self) -> None:
        self._last_chunk = time.monotonic()  # nor is a stand
        await self._backend.thaw()
        self._last_chunk = time.monotonic()

    def _set_gate(self) -> None:
        if self._paused or self._num_standing:
            self._gate.clear()
        else:
            self._gate.set()


class RefittedEngine(AsyncEngineWorker):
    """An engine that comes to a stand for new weights, and answers nothing when it may have torn ones."""

    def __init__(self, backend: AsyncBackend, name: str, *, commit_seconds: float) -> None:
        """`commit_seconds` is the most that coming to a stand may last."""
        super().__init__(backend, name)
        self._commit_seconds = commit_seconds

    @asynccontextmanager
    async def _standing_for(self, version: int, *, drain: bool) -> AsyncIterator[None]:
        """`standing`, which must begin in time. Raises `RefitDeadline`."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._commit_seconds):
                    await stack.enter_async_context(self.standing(drain=drain))
            except TimeoutError as error:
                raise RefitDeadline(
                    f"refit to version {version}: {self._name} did not come to a stand within "
                    f"{self._commit_seconds:g} s (cluster.deadlines.refit)"
                ) from error
            yield

    def _torn_by(self, version: int, error: Exception) -> RefitFailed:
        """The failure of taking a version, after which the engine answers nothing; to be raised."""
        torn = f"{self._name} may have weights of no version, since it failed to take version {version}"
        self.fail(EngineFailed(f"{torn}: {error}"))
        return RefitFailed(f"refit to version {version}: {error}; {torn}")


async def _first_of(*events: asyncio.Event) -> None:
    """Return when one of them is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _all_there(reports: asyncio.Queue[Report | Exception]) -> tuple[list[Report], Exception | None]:
    """The next reports, up to an error: at least one, or the error."""
    batch: list[Report] = []
    while not batch or not reports.empty():
        report = await reports.get()
        if isinstance(report, Exception):
            return batch, report
        batch.append(report)
    return batch, None
