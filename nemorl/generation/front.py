"""The interface of every engine process, which two drivers implement.

StepDriver      an engine that is stepped: one thread runs it, everything else is posted to that thread
RequestDriver   an engine that samples request by request: one task for each, in the event loop
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Literal

from .types import EngineHealth, EngineStats, GenerationRequest, Progress, Report

# `wait`: running sequences finish first, waiting ones keep waiting; `keep`: all freeze in place and continue
# after `resume`; `abort`: all end with what they have.
PauseMode = Literal["wait", "keep", "abort"]


# Share of `cluster.deadlines.refit` within which running sequences may finish before an update.
DRAIN_SHARE = 0.5


class ReportStream:
    """Reports on their way, in batches, to the event loop that made the stream; written from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reports: list[Report] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, reports: Sequence[Report], error: Exception | None = None) -> None:
        """Add reports in the order in which they were made; an `error` ends the stream after them."""
        if not self._loop.is_closed():  # a closed loop has no reader
            self._loop.call_soon_threadsafe(self._add, reports, error)

    async def next(self) -> Sequence[Report]:
        """All reports since the last call, at least one. Raises the error that ended the stream."""
        await self._news.wait()
        if not self._reports:
            assert self._error is not None
            raise self._error
        batch, self._reports = self._reports, []
        if self._error is None:
            self._news.clear()
        return batch

    def _add(self, reports: Sequence[Report], error: Exception | None) -> None:
        if self._error is None:
            self._reports += reports
            self._error = error
            self._news.set()


class EngineFront(ABC):
    """An engine as its callers see it. The coroutines belong to one event loop."""

    @abstractmethod
    async def submit(self, requests: Sequence[GenerationRequest], stream: ReportStream) -> None:
        """Start requests that report to `stream`. Raises RequestRefused, with none started; EngineFailed."""

    @abstractmethod
    async def abandon(self, stream: ReportStream) -> None:
        """End what is in flight for a stream that has no reader any more; then its ids are free again."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; those in flight are answered with what they have and stop reason `abort`."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Return when no step runs or will run; requests that arrive meanwhile wait for `resume`."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def stats(self) -> EngineStats:
        """What was done since the last call."""

    @abstractmethod
    def health(self) -> EngineHealth:
        """Current state. Raises EngineFailed, with its cause, if the engine has failed."""

    def queues(self) -> dict[str, float]:
        """What waits here, for a stall report; called from any thread. Raises as `health`."""
        health = self.health()
        since = health.seconds_since_step
        return {"running": health.running, "waiting": health.waiting, "seconds_since_step": since}

    async def generate_batches(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[Sequence[Report], None]:
        """All reports since the last item. Raises as `submit`; a caller that stops ends what is left."""
        stream, unanswered = ReportStream(), len(requests)
        try:
            await self.submit(requests, stream)
            while unanswered:
                batch = await stream.next()
                unanswered -= sum(not isinstance(report, Progress) for report in batch)
                yield batch
        finally:
            if unanswered:
                await self.abandon(stream)
