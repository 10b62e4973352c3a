"""A generation worker over an engine that samples by itself, request by request, as serving engines do.

generate_batches ──▶ one task per request ──▶ gate (shut while paused) ──▶ backend.sample ──▶ chunks
                 ◀── progress and completions of all requests of the call, as they come
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from nemorl.trajectories import Int16Array, StopReason

from .async_request import Figures, OpenRequest
from .async_stand import Stand
from .engine_thread import PauseMode
from .errors import EngineFailed, RequestRefused
from .types import Completion, EngineHealth, EngineStats, GenerationRequest, Progress, Refusal, Report


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
        self._figures = Figures()

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

    def tear(self, reason: str) -> None:
        """Tell by `health` that the weights are of no version. The caller lets it stand until `recover`."""
        self._torn = reason

    def recover(self) -> None:
        """Serve again: what had failed or was torn has been mended."""
        self._failure = None
        self._torn = None

    async def stats(self) -> EngineStats:
        """What was done since the last call."""
        done, self._figures = self._figures, Figures(peak=len(self._running))
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
        self._figures.count(len(self._running))
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
                        self._figures.tokens += len(chunk.tokens)
                        self._last_chunk = time.monotonic()
                        if chunk.stop is not None:
                            return chunk.stop
        except TimeoutError:
            if not deadline.expired():
                raise
            return StopReason.ABORT
        raise EngineFailed(f"{self._name} ended request {request.id!r} without saying why")

    def _enter(self, request: GenerationRequest) -> None:
        self._figures.count(len(self._running))
        if not self._running:
            self._last_chunk = time.monotonic()  # rest is no hanging
        self._running.add(request.id)
        self._idle.clear()
        self._figures.prompt_tokens += len(request.prompt)
        self._figures.peak = max(self._figures.peak, len(self._running))

    async def _thaw(self) -> None:
        self._last_chunk = time.monotonic()  # nor is a stand
        await self._backend.thaw()
        self._last_chunk = time.monotonic()

    def _set_gate(self) -> None:
        if self._paused or self._num_standing:
            self._gate.clear()
        else:
            self._gate.set()


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
