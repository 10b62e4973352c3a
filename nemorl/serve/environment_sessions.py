"""Environments for callers in other processes: a session for each episode, and the end of those left behind.

    open ─▶ reset ─▶ step … step ─▶ close
      └ refused while `max_sessions` are open      └ or `idle_seconds` without a call

A failing, slow or hanging environment affects its own session only, unless it blocks the event loop.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from nemorl.config.environment import EnvBase
from nemorl.trajectories import (
    Action,
    EnvironmentFactory,
    EnvironmentLost,
    Message,
    Step,
    Task,
    ToolSchemas,
    called,
    created,
    opening_problem,
    step_problem,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 1.0  # after which a caller without a place asks again
CLOSE_SECONDS = 30.0  # of an environment's `close`; its place is free after that
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.05, 10.0  # between two looks for idle sessions

# no_place: ask again later. session_unknown: it was closed, or the process is another one. environment_lost:
# the environment's own service is gone. environment_error: it raised.
FailureCode = Literal["no_place", "session_unknown", "session_busy", "environment_lost", "environment_error"]


class SessionFailed(Exception):
    """A call of a session that has no answer."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code: FailureCode = code


@dataclass(frozen=True)
class Caller:
    """Who opens a session. Those of an earlier start of the same process are closed."""

    name: str
    start: str  # differs between starts


@dataclass(frozen=True)
class Opening:
    messages: tuple[Message, ...]
    tools: ToolSchemas = ()
    stop_strings: tuple[str, ...] = ()  # of the first turn


@dataclass(frozen=True)
class SessionCounts:
    """State of a service of environments. All but `open` and `max_open` are counts since its start."""

    open: int
    max_open: int
    opened: int
    expired: int  # idle for too long
    errors: int  # calls that raised
    answered: int  # calls


@dataclass(eq=False)
class _Session:
    environment: Any
    caller: Caller
    used_at: float = field(default_factory=time.monotonic)
    call: "asyncio.Future[Any] | None" = None
    close: "asyncio.Future[None] | None" = None


class Sessions:
    """Belongs to one event loop."""

    def __init__(self, factory: EnvironmentFactory, max_sessions: int, idle_seconds: float) -> None:
        self._factory, self._max_sessions, self._idle_seconds = factory, max_sessions, idle_seconds
        self._sessions: dict[str, _Session] = {}
        self._starts: dict[str, str] = {}  # the newest of each caller
        self._expiry: asyncio.Task[None] | None = None
        self._opened = self._expired = self._errors = self._answered = 0

    @property
    def counts(self) -> SessionCounts:
        totals = (self._opened, self._expired, self._errors, self._answered)
        return SessionCounts(len(self._sessions), self._max_sessions, *totals)

    def open(self, caller: Caller) -> str:
        """Make an environment, and return the name of its session. Raises SessionFailed."""
        if self._expiry is None:
            self._expiry = asyncio.create_task(self._end_idle())
        if self._starts.get(caller.name, caller.start) != caller.start:
            for name, session in [*self._sessions.items()]:
                if session.caller.name == caller.name and session.caller.start != caller.start:
                    self._begin_close(name)
        self._starts[caller.name] = caller.start
        if len(self._sessions) >= self._max_sessions:
            raise SessionFailed("no_place", f"all {self._max_sessions} sessions are in use; try again")
        try:
            environment = created(self._factory)
        except Exception as error:
            raise self._failed(error) from error
        if not hasattr(environment, "step"):
            problem = "it has no `step`; an environment that runs its episodes itself cannot be served"
            raise SessionFailed("environment_error", f"{type(environment).__name__}: {problem}")
        name = secrets.token_hex(16)
        self._sessions[name] = _Session(environment, caller)
        self._opened += 1
        return name

    async def reset(self, name: str, task: Task) -> Opening:
        environment = self._session(name).environment
        messages = await self._call(name, called(environment.reset, task, problem_of=opening_problem))
        tools, stop_strings = (tuple(getattr(environment, name, ())) for name in ("tools", "stop_strings"))
        return Opening(tuple(messages), tools, stop_strings)

    async def step(self, name: str, action: Action) -> Step:
        environment = self._session(name).environment
        return await self._call(name, called(environment.step, action, problem_of=step_problem))

    async def close(self, name: str) -> None:
        """End the session and its call, if one runs. One that is unknown has ended before."""
        if name in self._sessions:
            await asyncio.shield(self._begin_close(name))

    async def answer_in(self, text: str) -> str | None:
        """The answer in a text, as the environment's factory reads it; the whole text where it does not."""
        read: Callable[[str], Awaitable[str | None]] | None = getattr(self._factory, "answer_in", None)
        return text if read is None else await read(text)

    async def shut_down(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        await asyncio.gather(*(self._begin_close(name) for name in self._sessions))
        await self._factory.close()

    def _session(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None or session.close is not None:
            raise SessionFailed("session_unknown", "there is no such session: it was closed, idle or lost")
        return session

    async def _call(self, name: str, call: Coroutine[Any, Any, T]) -> T:
        session = self._session(name)
        if session.call is not None:
            call.close()
            raise SessionFailed("session_busy", "a call of this session has not ended")
        session.used_at, session.call = time.monotonic(), asyncio.ensure_future(call)
        try:
            await asyncio.wait({session.call})
            if session.call.cancelled():
                raise SessionFailed("session_unknown", "the session was closed during the call")
            if (error := session.call.exception()) is not None:
                raise self._failed(error) from error
            answer: T = session.call.result()
        finally:
            session.call.cancel()  # nothing when it is done; the caller may be gone
            session.used_at, session.call = time.monotonic(), None
        self._answered += 1
        return answer

    def _failed(self, error: BaseException) -> SessionFailed:
        self._errors += 1
        if isinstance(error, EnvironmentLost):
            return SessionFailed("environment_lost", str(error))
        return SessionFailed("environment_error", f"{type(error).__name__}: {error}")

    def _begin_close(self, name: str) -> "asyncio.Future[None]":
        session = self._sessions[name]
        if session.close is None:
            session.close = asyncio.ensure_future(self._close(name, session))
        return session.close

    async def _close(self, name: str, session: _Session) -> None:
        if session.call is not None:
            session.call.cancel()
        closing = asyncio.ensure_future(called(session.environment.close))
        done, _ = await asyncio.wait({closing}, timeout=CLOSE_SECONDS)
        closing.cancel()
        del self._sessions[name]
        if not done:
            log.warning("close of an environment has not ended within %g s", CLOSE_SECONDS)
        elif not closing.cancelled() and (error := closing.exception()) is not None:
            log.warning("close of an environment raised %s: %s", type(error).__name__, error)

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(min(max(self._idle_seconds / 4, MIN_POLL_SECONDS), MAX_POLL_SECONDS))
            oldest = time.monotonic() - self._idle_seconds
            for name, session in [*self._sessions.items()]:
                if session.used_at < oldest and session.close is None:
                    log.warning(
                        "a session of %s ends: no call for %g s", session.caller.name, self._idle_seconds
                    )
                    self._expired += 1
                    self._begin_close(name)


@dataclass(frozen=True)
class Failure:
    """A SessionFailed as a value, for callers to whom an exception would be a failure of the process."""

    code: FailureCode
    message: str


class EnvironmentHost:
    """The environments of one section, in an actor whose methods run in its event loop."""

    def __init__(self, config: EnvBase, max_sessions: int, idle_seconds: float) -> None:
        self._sessions = Sessions(config.make_factory(), max_sessions, idle_seconds)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Sessions`."""
        try:
            answer = getattr(self._sessions, method)(*arguments)
            return answer if isinstance(answer, str) else await answer
        except SessionFailed as failed:
            return Failure(failed.code, str(failed))

    async def counts(self) -> SessionCounts:
        return self._sessions.counts

    async def close(self) -> None:
        await self._sessions.shut_down()
