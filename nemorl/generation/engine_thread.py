"""The loop that drives an engine: everything that touches the engine runs in it, between two steps."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeVar

import torch

from .backends import SamplingEngine
from .types import Completion, EngineFailed, EngineHealth, GenerationRequest, Report, RequestRefused

T = TypeVar("T")

PauseMode = Literal["wait", "keep", "abort"]
"""What becomes of sequences in flight when an engine pauses.

`wait`: the running ones finish first, those in line stay there; `keep`: all freeze in place and go on after
`resume`; `abort`: all end with what they have.
"""


class Inbox(Protocol):
    """Where the answers to one set of requests go; called from the engine's thread."""

    def put(self, reports: Sequence[Report]) -> None:
        """Some of the requests ended, or came further."""
        ...

    def fail(self, error: Exception) -> None:
        """No further answer will come."""
        ...


class EngineLoop:
    """Runs an engine in whatever thread calls `run`; all else may be called from any thread, at any time.

    An error in it ends it for good and is what everyone waiting gets. What is asked for while nobody runs it
    waits.
    """

    def __init__(self, engine: SamplingEngine, name: str, rest: Callable[[], float] | None = None) -> None:
        """`rest` is called while there is nothing to step, and says in how many seconds to call it again."""
        self._engine = engine
        self._name = name
        self._rest = rest
        self._rest_seconds: float | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._inboxes: dict[str, Inbox] = {}  # of each request in flight
        self._draining: list[Future[None]] = []  # who waits for running sequences to finish before a pause
        self._paused = self._closing = self._leaving = False
        self._last_step = time.monotonic()
        # Guards what callers and the end of the thread both touch: once `_failure` is set, nothing is taken.
        self._lock = threading.Lock()
        self._futures: set[Future[Any]] = set()
        self._failure: EngineFailed | None = None

    def run(self) -> None:
        """Step until `leave`, after which it may be run again, or `close`. Raises what the engine raises."""
        self._rest_seconds = None if self._rest is None else 0.0
        try:
            while not (self._closing or self._leaving):
                self._turn()
        except BaseException as error:
            self._end(error)
            raise
        self._leaving = False
        if self._closing:
            self._end(None)

    def leave(self) -> Future[None]:
        """Return from `run` after the present step; what is in flight stays there."""
        return self._post(self._leave)

    def submit(self, requests: Sequence[GenerationRequest], inbox: Inbox) -> Future[None]:
        """Let requests join together, in order. If one is refused none joins; the future has the reason."""
        return self._post(lambda future: self._add(requests, inbox, future))

    def abandon(self, inbox: Inbox) -> None:
        """End what is in flight for an inbox that nobody reads any more."""
        if self._failure is None:
            self._post(lambda future: self._abandon(inbox, future))

    def abort(self, request_ids: Sequence[str]) -> Future[None]:
        """End requests; those in flight are answered with what they have."""
        return self._post(lambda future: self._abort(request_ids, future))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run something that touches the engine between two steps. If it raises, the engine has failed."""
        return self._post(lambda future: future.set_result(function()))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop stepping; done when nothing steps any more. Requests that arrive meanwhile wait."""
        return self._post(lambda future: self._pause(mode, future))

    def resume(self) -> Future[None]:
        """Go on stepping."""
        return self._post(self._resume)

    def health(self) -> EngineHealth:
        """Where the engine stands. Raises EngineFailed if it has ended."""
        if self._failure is not None:
            raise self._failure
        return EngineHealth(
            version=self._engine.version,
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            paused=self._paused,
            seconds_since_step=time.monotonic() - self._last_step,
        )

    def close(self) -> None:
        """End it after the present step; whoever still waits gets EngineFailed."""
        if self._failure is None:
            self._post(self._close)

    def _post(self, command: Callable[[Future[T]], None]) -> Future[T]:
        """Have the thread run `command`, which sees to its future, unless that is cancelled before."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                command(future)

        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._futures.add(future)
            self._commands.put(run)
        future.add_done_callback(self._futures.discard)
        return future

    def _turn(self) -> None:
        for command in self._take_commands():
            command()
        if self._closing or self._leaving:
            return
        if self._paused:
            self._deliver(self._engine.expire())
            self._take_rest()
            return
        self._deliver(self._engine.step(admit=not self._draining))
        self._tell(self._engine.take_progress())
        self._last_step = time.monotonic()
        if self._draining and self._engine.num_running == 0:
            self._paused = True
            self._tell_drained()
        if self._engine.num_running == 0:
            self._take_rest()

    def _take_rest(self) -> None:
        if self._rest is not None:
            self._rest_seconds = self._rest()

    def _take_commands(self) -> list[Callable[[], None]]:
        """What was posted; where there is nothing to step, wait for that or for the next deadline."""
        in_flight = self._engine.num_running + self._engine.num_waiting > 0
        stepping = not self._paused and (in_flight or bool(self._draining))
        expiry = self._engine.next_expiry
        timeout = None if expiry is None else max(0.0, expiry - time.monotonic())
        if self._rest_seconds is not None:
            timeout = self._rest_seconds if timeout is None else min(timeout, self._rest_seconds)
        commands = []
        try:
            commands.append(self._commands.get(block=not stepping, timeout=timeout))
            if not stepping:
                self._last_step = time.monotonic()  # rest is no hanging
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _add(self, requests: Sequence[GenerationRequest], inbox: Inbox, added: Future[None]) -> None:
        joined = []
        try:
            for request in requests:
                self._engine.add(request)
                joined.append(request.id)
        except RequestRefused as refusal:
            for request_id in joined:
                self._engine.abort(request_id)
            added.set_exception(refusal)
            return
        self._inboxes.update(dict.fromkeys(joined, inbox))
        added.set_result(None)

    def _abort(self, request_ids: Sequence[str], aborted: Future[None]) -> None:
        ended = [self._engine.abort(request_id) for request_id in request_ids]
        self._deliver([completion for completion in ended if completion is not None])
        aborted.set_result(None)

    def _abandon(self, inbox: Inbox, abandoned: Future[None]) -> None:
        self._abort([request_id for request_id, box in self._inboxes.items() if box is inbox], abandoned)

    def _pause(self, mode: PauseMode, paused: Future[None]) -> None:
        if mode == "wait" and not self._paused:
            self._draining.append(paused)
            return
        if mode == "abort":
            self._deliver(self._engine.abort_all())
        self._paused = True
        self._tell_drained()
        paused.set_result(None)

    def _resume(self, resumed: Future[None]) -> None:
        self._paused = False
        self._tell_drained()
        resumed.set_result(None)

    def _tell_drained(self) -> None:
        """To whoever waits for the end of what runs there is no more to wait for."""
        draining, self._draining = self._draining, []
        for drained in draining:
            drained.set_result(None)

    def _leave(self, left: Future[None]) -> None:
        self._leaving = True
        left.set_result(None)

    def _close(self, closed: Future[None]) -> None:
        self._closing = True
        closed.set_result(None)

    def _deliver(self, completions: Sequence[Completion]) -> None:
        self._tell(completions)
        for completion in completions:
            del self._inboxes[completion.id]

    def _tell(self, reports: Sequence[Report]) -> None:
        by_inbox: dict[Inbox, list[Report]] = {}
        for report in reports:
            by_inbox.setdefault(self._inboxes[report.id], []).append(report)
        for inbox, own in by_inbox.items():
            inbox.put(own)

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
        for inbox in set(self._inboxes.values()):
            inbox.fail(failure)


class EngineThread(EngineLoop):
    """The loop in a thread of its own, which runs until `close`."""

    def __init__(self, engine: SamplingEngine, name: str, threads: int | None) -> None:
        """`threads`: CPU threads of the engine's kernels; torch's choice when not given."""
        super().__init__(engine, name)
        self._num_threads = threads
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_seconds: float = 10.0) -> None:
        """End the thread after the present step; whoever still waits gets EngineFailed."""
        super().close()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # holds for the calling thread
        self.run()
