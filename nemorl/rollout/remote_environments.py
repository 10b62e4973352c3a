"""Environments that run elsewhere: in actors of the run, or behind a server (`nemorl serve env`).

    factory ─create▶ environment ─admit▶ a place ─reset, step, close▶ transport ─▶ actor | server

An environment waits for a place before its episode begins: not within the deadline of a call, and without a
place among the trajectories that are sampled. Nothing is sent twice: a call without an answer loses its
episode.
"""

import asyncio
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from nemorl.cluster.errors import ClusterError
from nemorl.config.environment import EnvBase, ServerPlacement
from nemorl.errors import RunError, shorten
from nemorl.rewards.scored import Service, attempt
from nemorl.serve.environment_sessions import RETRY_SECONDS, Caller, Failure, Opening
from nemorl.serve.environments import (
    AnswerAnswer,
    AnswerRequest,
    CloseAnswer,
    OpenAnswer,
    OpenRequest,
    ResetAnswer,
    ResetRequest,
    SentAction,
    StepAnswer,
    StepRequest,
)
from nemorl.trajectories import (
    Action,
    Environment,
    EnvironmentFactory,
    EnvironmentLost,
    Message,
    Step,
    Task,
)

if TYPE_CHECKING:
    from nemorl.cluster.worker import Worker  # with Ray

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0  # for a session, or the answer in a text
MAX_ASKING = 32  # episodes that ask for a place at a time; others wait for their turn
_LOST = frozenset({"session_unknown", "environment_lost"})

B = TypeVar("B", bound=BaseModel)


class NoPlace(Exception):
    """All places are taken."""

    def __init__(self, retry_seconds: float = RETRY_SECONDS) -> None:
        super().__init__()
        self.retry_seconds = retry_seconds


class RemoteFailure(RuntimeError):
    """The environment raised, or the server refused; the message has its words."""


class Transport(Protocol):
    """Reaches the sessions of one process. All methods raise EnvironmentLost when it does not answer."""

    async def open(self) -> str:
        """Raises NoPlace."""

    async def reset(self, session: str, task: Task) -> Opening: ...

    async def step(self, session: str, action: Action) -> Step: ...

    async def close(self, session: str) -> None: ...

    async def answer_in(self, text: str) -> str | None: ...

    async def end(self) -> None:
        """Release what the transport holds itself."""


def _raise_for(code: str, message: str, retry_seconds: float = RETRY_SECONDS) -> None:
    """The exception of a failure's code (`FailureCode`)."""
    if code == "no_place":
        raise NoPlace(retry_seconds)
    if code in _LOST:
        raise EnvironmentLost(message)
    raise RemoteFailure(message)


@dataclass(frozen=True, eq=False)
class ActorTransport:
    worker: "Worker"  # whose target is an `EnvironmentHost`
    caller: Caller
    call_seconds: float

    async def open(self) -> str:
        return str(await self._ask("open", self.caller))

    async def reset(self, session: str, task: Task) -> Opening:
        opening: Opening = await self._ask("reset", session, task, seconds=self.call_seconds)
        return opening

    async def step(self, session: str, action: Action) -> Step:
        step: Step = await self._ask("step", session, action, seconds=self.call_seconds)
        return step

    async def close(self, session: str) -> None:
        await self._ask("close", session)

    async def answer_in(self, text: str) -> str | None:
        answer: str | None = await self._ask("answer_in", text)
        return answer

    async def end(self) -> None:
        """The actor ends with the run."""

    async def _ask(self, method: str, *arguments: Any, seconds: float = ANSWER_SECONDS) -> Any:
        try:
            answer = await self.worker.call("ask", method, *arguments, stage="environment", seconds=seconds)
        except ClusterError as error:
            raise EnvironmentLost(str(error)) from error
        if isinstance(answer, Failure):
            _raise_for(answer.code, answer.message)
        return answer


class HttpTransport:
    """Belongs to one event loop."""

    def __init__(self, config: ServerPlacement, caller: Caller, field: str = "env.placement") -> None:
        """Raises RunError when the variable of the key is not set; `field` names the section."""
        self._url, self._caller = config.url.rstrip("/"), caller
        self._headers: dict[str, str] = {}
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env, "").strip()
            if not key:
                problem = "this environment variable is unset or empty; set it to the key of the server"
                raise RunError(f"{field}.api_key_env = {config.api_key_env}: {problem}")
            self._headers["Authorization"] = f"Bearer {key}"
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> str:
        body = OpenRequest(client=self._caller)
        return (await self._ask("POST", "/sessions", OpenAnswer, body, ANSWER_SECONDS)).id

    async def reset(self, session: str, task: Task) -> Opening:
        body = ResetRequest(task=task)
        return (await self._ask("POST", f"/sessions/{session}/reset", ResetAnswer, body)).opening

    async def step(self, session: str, action: Action) -> Step:
        body = StepRequest(action=SentAction.of(action))
        return (await self._ask("POST", f"/sessions/{session}/step", StepAnswer, body)).step

    async def close(self, session: str) -> None:
        await self._ask("DELETE", f"/sessions/{session}", CloseAnswer)

    async def answer_in(self, text: str) -> str | None:
        body = AnswerRequest(text=text)
        return (await self._ask("POST", "/answer", AnswerAnswer, body, ANSWER_SECONDS)).answer

    async def end(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _ask(
        self,
        method: str,
        path: str,
        kind: type[B],
        body: BaseModel | None = None,
        seconds: float | None = None,
    ) -> B:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        sent = None if body is None else body.model_dump_json()
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.request(method, f"{self._url}{path}", data=sent, headers=headers) as response,
            ):
                text, status = await response.text(), response.status
                retry_after = response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, OSError) as error:
            problem = f"{self._url} does not answer: {type(error).__name__}: {error}"
            raise EnvironmentLost(problem) from error
        if status >= 300:
            _raise_for(*_failure(self._url, status, text, retry_after))
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            problem = f"{self._url}{path} answered {shorten(text)}, where {where}: {first['msg']}"
            raise RemoteFailure(problem) from error


def _failure(url: str, status: int, text: str, retry_after: str) -> tuple[str, str, float]:
    """Code and message of an answer that is a failure, and the seconds to wait before another attempt."""
    code, message = "", shorten(text)
    with suppress(ValueError, KeyError, TypeError):
        error = json.loads(text)["error"]
        code, message = str(error.get("code") or ""), str(error["message"])
    if status == 429:
        code = "no_place"
    elif not code:  # of a proxy
        code = "environment_lost" if status >= 500 else "refused"
    seconds = RETRY_SECONDS
    with suppress(ValueError):  # absent, or a date
        seconds = max(0.0, float(retry_after))
    return code, f"{url} answered status {status}: {message}", seconds


class RemoteEnvironment(Environment):
    def __init__(self, factory: "RemoteFactory") -> None:
        self._factory = factory
        self._place: _Place | None = None
        self._refusal: Exception | None = None

    @asynccontextmanager
    async def admitted(self, seconds: float | None) -> AsyncIterator[None]:
        """Inside, it has a place; waits for it for `seconds` at most. `reset` raises what went wrong."""
        await self._admit(seconds)
        try:
            yield
        finally:  # nothing is left to close if the episode began
            await attempt(self.close(), "environment close", ANSWER_SECONDS)

    async def _admit(self, seconds: float | None = None) -> None:
        try:
            async with asyncio.timeout(seconds):
                self._place = await self._factory.take_place()
        except (EnvironmentLost, RemoteFailure, TimeoutError) as error:
            self._refusal = error

    async def reset(self, task: Task) -> tuple[Message, ...]:
        if self._place is None and self._refusal is None:
            await self._admit()
        if self._place is None:
            assert self._refusal is not None, "it has neither a place nor a reason"
            raise self._refusal
        opening = await self._place.transport.reset(self._place.session, task)
        self.tools, self.stop_strings = opening.tools, opening.stop_strings
        return opening.messages

    async def step(self, action: Action) -> Step:
        assert self._place is not None, "reset was not called"
        return await self._place.transport.step(self._place.session, action)

    async def close(self) -> None:
        place, self._place = self._place, None
        if place is None:
            return
        try:
            with suppress(EnvironmentLost):  # and the session with it
                await place.transport.close(place.session)
        finally:
            self._factory.free(place)


@dataclass(frozen=True, eq=False)
class _Place:
    transport: Transport
    session: str


class RemoteFactory(EnvironmentFactory):
    """Environments of one section that run elsewhere. Belongs to one event loop."""

    def __init__(
        self, reward_weights: Mapping[str, float], transports: Sequence[Transport], name: str
    ) -> None:
        """`name`: of the environment, for stall reports."""
        self.reward_weights = dict(reward_weights)
        self.places = Service(f"a place in {name}")
        self._transports = tuple(transports)
        self._taken: dict[_Place, None] = {}
        self._asking = asyncio.Semaphore(MAX_ASKING)
        self._freed = asyncio.Event()
        self._abandoned: set[asyncio.Task[None]] = set()

    def create(self) -> RemoteEnvironment:
        return RemoteEnvironment(self)

    async def take_place(self) -> _Place:
        """A session of the process with the fewest of ours. Raises EnvironmentLost if none answers."""
        with self.places.calling():
            async with self._asking:
                while True:
                    self._freed.clear()
                    place, seconds = await self._ask_all()
                    if place is not None:
                        self._taken[place] = None
                        self.places.answered()
                        return place
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._freed.wait(), seconds)

    async def _ask_all(self) -> tuple[_Place | None, float]:
        """A place, or the seconds after which to ask again."""
        loads = dict.fromkeys(self._transports, 0)
        for place in self._taken:
            if place.transport in loads:
                loads[place.transport] += 1
        wait, lost = None, EnvironmentLost("no process of this environment is up")
        for transport in sorted(loads, key=loads.__getitem__):
            try:
                return _Place(transport, await self._open(transport)), 0.0
            except NoPlace as full:
                wait = full.retry_seconds
            except EnvironmentLost as error:
                lost = error
        if wait is None:
            raise lost
        return None, wait

    async def _open(self, transport: Transport) -> str:
        """A session, which is closed again if no episode waits for it any more."""
        opening = asyncio.ensure_future(transport.open())
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:

            async def abandon() -> None:
                with suppress(NoPlace, EnvironmentLost, RemoteFailure):
                    await transport.close(await opening)

            ending = asyncio.create_task(abandon())
            self._abandoned.add(ending)
            ending.add_done_callback(self._abandoned.discard)
            raise

    def set_transports(self, transports: Sequence[Transport]) -> None:
        """Other processes than before; episodes in those that are gone are lost."""
        self._transports = tuple(transports)
        self._freed.set()

    def free(self, place: _Place) -> None:
        self._taken.pop(place, None)
        self._freed.set()

    async def answer_in(self, text: str) -> str | None:
        lost = EnvironmentLost("no process of this environment is up")
        for transport in self._transports:
            try:
                return await transport.answer_in(text)
            except EnvironmentLost as error:
                lost = error
        raise lost

    async def close(self) -> None:
        await asyncio.gather(*self._abandoned)
        for transport in self._transports:
            await transport.end()


def factory_behind_server(
    config: EnvBase, placement: ServerPlacement, process: str = "", name: str = ""
) -> RemoteFactory:
    """`process`: what stays the same when this process is started again. Raises RunError."""
    caller = Caller(f"{socket.gethostname()} {process or os.getpid()}", secrets.token_hex(8))
    field = f"env.environments.{name}.placement" if name else "env.placement"
    transport = HttpTransport(placement, caller, field)
    return RemoteFactory(config.reward_weights, [transport], f"environment `{name or config.name}`")


class ActorFactory(RemoteFactory):
    """Environments in actors of the run, which change when one is lost or returns."""

    def __init__(
        self, config: EnvBase, actors: "Sequence[Worker]", call_seconds: float, process: str, name: str
    ) -> None:
        """`call_seconds`: of a call of an environment, which its caller limits too."""
        super().__init__(config.reward_weights, (), f"environment `{name or config.name}`")
        self._caller = Caller(process, secrets.token_hex(8))
        self._call_seconds = call_seconds + ANSWER_SECONDS
        self.set_actors(actors)

    def set_actors(self, actors: "Sequence[Worker]") -> None:
        self.set_transports([ActorTransport(one, self._caller, self._call_seconds) for one in actors])
