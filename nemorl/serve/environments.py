"""The HTTP application of environments (docs/environment_service.md): JSON, a session for each episode.

    POST   /v1/sessions              {"client": {"name", "start"}}   ─▶ 201 {"id"}
    POST   /v1/sessions/ID/reset     {"task": {…}}                   ─▶ {"messages", "tools", "stop_strings"}
    POST   /v1/sessions/ID/step      {"action": {…}}                 ─▶ {"messages", "rewards", "done", …}
    DELETE /v1/sessions/ID                                           ─▶ {}
    POST   /v1/answer                {"text"}                        ─▶ {"answer"}
    GET    /health                   needs no token                  ─▶ {"status", "environments"}

Those of an environment of several have its name before `sessions` and `answer`: /v1/NAME/sessions.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from nemorl.config.generation import EndpointConfig
from nemorl.trajectories import Action, EnvironmentFactory, Message, Reply, Step, StopReason, Task

from .app import Listening, answering, event_at_signals
from .environment_sessions import Caller, FailureCode, Opening, SessionFailed, Sessions
from .requests import ApiError, bad_request

STATUS: dict[FailureCode, int] = {
    "no_place": 429,
    "session_unknown": 404,
    "session_busy": 409,
    "environment_lost": 503,
    "environment_error": 500,
}


class _Body(BaseModel):
    """Further fields are ignored, so that a later version may have them."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class OpenRequest(_Body):
    client: Caller


class OpenAnswer(_Body):
    id: str


class ResetRequest(_Body):
    task: Task


class ResetAnswer(_Body):
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    stop_strings: tuple[str, ...] = ()

    @classmethod
    def of(cls, opening: Opening) -> "ResetAnswer":
        tools = tuple(dict(tool) for tool in opening.tools)
        return cls(messages=opening.messages, tools=tools, stop_strings=opening.stop_strings)

    @property
    def opening(self) -> Opening:
        return Opening(self.messages, self.tools, self.stop_strings)


class SentAction(_Body):
    text: str
    tokens: list[int] = []
    stop: StopReason = StopReason.STOP
    reply: Reply | None = None

    @classmethod
    def of(cls, action: Action) -> "SentAction":
        return cls(text=action.text, tokens=action.tokens.tolist(), stop=action.stop, reply=action.reply)

    @property
    def action(self) -> Action:
        return Action(self.text, np.array(self.tokens, dtype=np.int32), self.stop, self.reply)


class StepRequest(_Body):
    action: SentAction


class StepAnswer(_Body):
    messages: tuple[Message, ...] = ()
    rewards: dict[str, float] = {}
    done: bool = True
    num_retries: int = 0
    stop_strings: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: Step) -> "StepAnswer":
        rewards = {name: float(value) for name, value in step.rewards.items()}
        return cls(**vars(step) | {"rewards": rewards})

    @property
    def step(self) -> Step:
        return Step(self.messages, dict(self.rewards), self.done, self.num_retries, self.stop_strings)


class AnswerRequest(_Body):
    text: str


class AnswerAnswer(_Body):
    answer: str | None


class CloseAnswer(_Body):
    """Nothing."""


B = TypeVar("B", bound=_Body)


class EnvironmentService:
    """Routes over the sessions of one environment, whose name is empty, or of several by name."""

    def __init__(self, sessions: Mapping[str, Sessions]) -> None:
        self._sessions = sessions

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/health", self.health)  # needs no token
        for name, sessions in self._sessions.items():
            base = f"/v1/{name}" if name else "/v1"
            of_one = _Routes(sessions)
            app.router.add_post(f"{base}/sessions", of_one.open)
            app.router.add_post(f"{base}/sessions/{{id}}/reset", of_one.reset)
            app.router.add_post(f"{base}/sessions/{{id}}/step", of_one.step)
            app.router.add_delete(f"{base}/sessions/{{id}}", of_one.close)
            app.router.add_post(f"{base}/answer", of_one.answer)
        app.cleanup_ctx.append(self._while_running)

    async def health(self, request: web.Request) -> web.Response:
        counts = {name: asdict(sessions.counts) for name, sessions in self._sessions.items()}
        return web.json_response({"status": "ok", "environments": counts})

    async def _while_running(self, _: web.Application) -> AsyncIterator[None]:
        yield
        for sessions in self._sessions.values():
            await sessions.shut_down()


class _Routes:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def open(self, request: web.Request) -> web.Response:
        body = await _read(OpenRequest, request)

        async def open_session() -> OpenAnswer:
            return OpenAnswer(id=self._sessions.open(body.client))

        return await _answer(open_session, status=201)

    async def reset(self, request: web.Request) -> web.Response:
        name, task = request.match_info["id"], (await _read(ResetRequest, request)).task

        async def reset() -> ResetAnswer:
            return ResetAnswer.of(await self._sessions.reset(name, task))

        return await _answer(reset)

    async def step(self, request: web.Request) -> web.Response:
        name, action = request.match_info["id"], (await _read(StepRequest, request)).action.action

        async def step() -> StepAnswer:
            return StepAnswer.of(await self._sessions.step(name, action))

        return await _answer(step)

    async def close(self, request: web.Request) -> web.Response:
        await self._sessions.close(request.match_info["id"])
        return web.json_response({})

    async def answer(self, request: web.Request) -> web.Response:
        text = (await _read(AnswerRequest, request)).text

        async def answer() -> AnswerAnswer:
            return AnswerAnswer(answer=await self._sessions.answer_in(text))

        return await _answer(answer)


async def _read(kind: type[B], request: web.Request) -> B:
    try:
        return kind.model_validate_json(await request.read())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise bad_request(f"{field or 'The body'}: {first['msg']}.", field or None) from error


async def _answer(call: Callable[[], Awaitable[_Body]], status: int = 200) -> web.Response:
    try:
        body = await call()
    except SessionFailed as failed:
        kind = "environment_error" if failed.code.startswith("environment") else "session_error"
        raise ApiError(STATUS[failed.code], str(failed), kind=kind, code=failed.code) from failed
    return web.Response(text=body.model_dump_json(), status=status, content_type="application/json")


async def serve_environments(
    factories: Mapping[str, EnvironmentFactory],
    endpoint: EndpointConfig,
    max_sessions: int,
    idle_seconds: float,
    announce: Callable[[Listening], None],
) -> None:
    """Answer over HTTP until the process receives SIGINT or SIGTERM. Raises RunError."""
    sessions = {name: Sessions(one, max_sessions, idle_seconds) for name, one in factories.items()}
    # What is limited are sessions: each has at most one call, and may be closed at the same time.
    limit = max(endpoint.max_concurrent_requests, 3 * max_sessions * len(sessions))
    endpoint = endpoint.model_copy(update={"max_concurrent_requests": limit})
    async with answering(endpoint, EnvironmentService(sessions).add_routes) as at:
        announce(at)
        await event_at_signals().wait()
