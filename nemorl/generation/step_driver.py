"""The driver of an engine that is stepped: everything that touches the engine runs in one thread."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from .batching import BatchingEngine
from .front import EngineFront, PauseMode, ReportStream
from .types import EngineFailed, EngineHealth, EngineStats, GenerationRequest, Report, RequestRefused

T = TypeVar("T")


class StepDriver(EngineFront):
    """Steps an engine in the thread that calls `run`; all else is posted to it. An error ends the engine."""

    def __init__(self, engine: BatchingEngine, name: str, rest: Callable[[], float] | None = None) -> None:
        """`rest` is called while there is nothing to step; it returns the seconds until its next call."""
        self._engine, self._name, self._rest = engine, name, rest
        self._rest_seconds: float | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, ReportStream] = {}  # of each request in flight
        self._draining: list[Future[None]] = []  # pauses that wait for running sequences to finish
        self._drained: list[tuple[float, Callable[[], None]]] = []  # commands that do, each until a time
        self._paused = False
        self._leaving, self._closing = threading.Event(), threading.Event()
        self._last_step = time.monotonic()
        self._busy_seconds = 0.0  # since `_stats_since`
        self._stats_since: float | None = None
        # Guards what callers and the end of the thread both touch: once `_failure` is set, nothing is posted.
        self._lock = threading.Lock()
        self._futures: set[Future[Any]] = set()
        self._failure: EngineFailed | None = None

    def run(self) -> None:
        """Step until `stop`, after which it may run again, or `close`. Raises what the engine raises."""
        self._rest_seconds = None if self._rest is None else 0.0
        try:
            while not self._is_ending():
                self._turn()
        except BaseException as error:
            self._end(error)
            raise
        self._leaving.clear()
        if self._closing.is_set():
            self._end(None)

    async def stop(self) -> None:
        """Let `run` return after the current step; what is in flight stays in the engine."""
        await self.call(self._leaving.set)

    async def submit(self, requests: Sequence[GenerationRequest], stream: ReportStream) -> None:
        await self.call(lambda: self._add(requests, stream))

    async def abandon(self, stream: ReportStream) -> None:
        # Does not wait: requests posted later come later.
        if self._failure is None:
            self.post(lambda: self._abort([name for name, other in self._streams.items() if other is stream]))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.call(lambda: self._abort(request_ids))

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function that touches the engine between two steps. If it raises, the engine has failed."""
        return await asyncio.wrap_future(self.post(function))

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.wrap_future(self._post(lambda paused: self._pause(mode, paused)))

    async def resume(self) -> None:
        await self.call(lambda: self._set_paused(False))

    async def stats(self) -> EngineStats:
        return await self.call(self._take_stats)

    def health(self) -> EngineHealth:
        if self._failure is not None:
            raise self._failure
        return EngineHealth(
            version=self._engine.version,
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            paused=self._paused,
            seconds_since_step=time.monotonic() - self._last_step,
            queued=self._engine.num_waiting,
        )

    def close(self) -> None:
        """End the engine after the current step; pending requests get EngineFailed."""
        if self._failure is None:
            self.post(self._closing.set)

    def post(self, function: Callable[[], T], drain_seconds: float = 0.0) -> Future[T]:
        """As `call`, from any thread and without waiting; a future that is cancelled in time is not run.

        Running sequences may finish first, within `drain_seconds`, during which others wait.
        """
        return self._post(lambda future: future.set_result(function()), drain_seconds)

    def _post(self, command: Callable[[Future[T]], None], drain_seconds: float = 0.0) -> Future[T]:
        """Have the thread run `command`, which completes the future, unless that is cancelled before."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    command(future)
                except RequestRefused as refusal:
                    future.set_exception(refusal)

        def run_drained() -> None:
            self._drained.append((time.monotonic() + drain_seconds, run))

        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._futures.add(future)
            self._commands.put(run_drained if drain_seconds else run)
        future.add_done_callback(self._futures.discard)
        return future

    def _turn(self) -> None:
        for command in self._take_commands():
            command()
        if self._is_ending():
            return
        self._run_drained()
        if self._paused:
            self._send(self._engine.expire())
        else:
            began, has_work = time.monotonic(), self._engine.num_running + self._engine.num_waiting > 0
            self._send(self._engine.step(admit=not (self._draining or self._drained)))
            self._send(self._engine.take_progress(), ended=False)
            self._last_step = time.monotonic()
            self._busy_seconds += (self._last_step - began) * has_work
            if self._draining and self._engine.num_running == 0:
                self._set_paused(True)
        if self._rest is not None and (self._paused or self._engine.num_running == 0):
            self._rest_seconds = self._rest()

    def _take_commands(self) -> list[Callable[[], None]]:
        """Posted commands; with nothing to step, wait for one or for the next deadline."""
        in_flight = self._engine.num_running + self._engine.num_waiting > 0
        stepping = not self._paused and (in_flight or bool(self._draining or self._drained))
        expiry = self._engine.next_expiry
        timeout = None if expiry is None else max(0.0, expiry - time.monotonic())
        if self._rest_seconds is not None:
            timeout = self._rest_seconds if timeout is None else min(timeout, self._rest_seconds)
        commands = []
        try:
            commands.append(self._commands.get(block=not stepping, timeout=timeout))
            if not stepping:
                self._last_step = time.monotonic()  # an idle engine does not hang
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _run_drained(self) -> None:
        """Run the commands for which no sequence runs (while paused none ends), or whose time has come."""
        still = self._paused or self._engine.num_running == 0
        now, waiting = time.monotonic(), self._drained
        self._drained = [(until, run) for until, run in waiting if not still and now < until]
        for until, run in waiting:
            if still or now >= until:
                run()

    def _add(self, requests: Sequence[GenerationRequest], stream: ReportStream) -> None:
        with ExitStack() as refused:
            for request in requests:
                self._engine.add(request)
                refused.callback(self._engine.abort, request.id)
            refused.pop_all()
        self._streams |= {request.id: stream for request in requests}
        self._stats_since = self._stats_since or time.monotonic()

    def _take_stats(self) -> EngineStats:
        now, busy, since = time.monotonic(), self._busy_seconds, self._stats_since
        self._busy_seconds, self._stats_since = 0.0, None if since is None else now
        return replace(self._engine.take_stats(), busy_seconds=busy, seconds=now - (since or now))

    def _abort(self, request_ids: Sequence[str]) -> None:
        ended = [self._engine.abort(request_id) for request_id in request_ids]
        self._send([completion for completion in ended if completion is not None])

    def _pause(self, mode: PauseMode, paused: Future[None]) -> None:
        self._draining.append(paused)
        if mode == "wait" and not self._paused:
            return
        if mode == "abort":
            self._abort(list(self._streams))
        self._set_paused(True)

    def _set_paused(self, paused: bool) -> None:
        """Pause or resume, which completes every pause that waits for running sequences."""
        self._paused = paused
        for drained in self._draining:
            drained.set_result(None)
        self._draining.clear()

    def _is_ending(self) -> bool:
        return self._leaving.is_set() or self._closing.is_set()

    def _send(self, reports: Sequence[Report], *, ended: bool = True) -> None:
        by_stream: dict[ReportStream, list[Report]] = {}
        for report in reports:
            by_stream.setdefault(self._streams[report.id], []).append(report)
            if ended:
                del self._streams[report.id]
        for stream, batch in by_stream.items():
            stream.put(batch)

    def _end(self, error: BaseException | None) -> None:
        reason = "it was closed" if error is None else f"{type(error).__name__}: {error}"
        failure = EngineFailed(f"{self._name} has ended: {reason}")
        failure.__cause__ = error
        with self._lock:
            self._failure = failure
            futures = list(self._futures)
        for future in futures:
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(failure)
        for stream in set(self._streams.values()):
            stream.put([], failure)
