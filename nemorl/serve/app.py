"""The HTTP application: who may ask, how much at a time, and the routes.

GET  /health               whether engines answer; asks for no key
GET  /v1/models            the model
POST /v1/completions       a prompt, as text or token ids
POST /v1/chat/completions  a conversation, with tools

What every endpoint does before and after it answers: the key, the most requests at a time, refusals.

Listening: the address, the key, and the end.
"""

import asyncio
import hmac
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from nemorl.config.generation import EndpointConfig
from nemorl.errors import RunError
from nemorl.generation.types import Completion

from .answers import Answer
from .requests import ApiError, ChatRequest, CompletionRequest, read_request
from .sampling import Served, Work, chat_work, completion_work, engine_requests, sample, stream

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal in one shape; what is our own mistake goes to the log, not to who asked."""
    try:
        return await handler(request)
    except ApiError as error:
        headers = {"Retry-After": "1"} if error.status == 429 else {}
        return web.json_response(error.body(), status=error.status, headers=headers)
    except web.HTTPRequestEntityTooLarge as error:
        refusal = ApiError(413, f"The body is too large: {error.text}.", code="body_too_large")
        return web.json_response(refusal.body(), status=error.status)
    except web.HTTPException as error:  # no such path or method
        refusal = ApiError(error.status, f"{request.method} {request.path}: {error.reason}.")
        return web.json_response(refusal.body(), status=error.status)
    except ConnectionResetError:  # who asked has gone away
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return web.json_response(
            ApiError(500, "The server failed; its log says how.", kind="server_error").body(), status=500
        )


def require_key(api_key: str) -> Any:
    """Refuses who does not send `Authorization: Bearer <api_key>`, but for /health."""
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        # In constant time, so that timing does not reveal the key.
        if request.path != "/health" and not hmac.compare_digest(given, expected):
            raise ApiError(
                401,
                "A key is required. Send it as `Authorization: Bearer <key>`.",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return await handler(request)

    return check


def at_a_time(most: int) -> Any:
    """Answer requests beyond the limit with a request to retry."""
    running = 0

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal running
        if request.method != "POST":
            return await handler(request)
        if running >= most:
            raise ApiError(
                429,
                f"{most} requests are being answered; try again.",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )
        running += 1
        try:
            return await handler(request)
        finally:
            running -= 1

    return count


def make_app(served: Served, *, api_key: str, max_concurrent: int, max_body_bytes: int) -> web.Application:
    """The application. Every path but /health requires `Authorization: Bearer <api_key>`."""
    app = web.Application(
        client_max_size=max_body_bytes,
        middlewares=[errors_as_json, require_key(api_key), at_a_time(max_concurrent)],
    )
    endpoint = _Endpoint(served)
    app.add_routes(
        [
            web.get("/health", endpoint.health),
            web.get("/v1/models", endpoint.models),
            web.post("/v1/completions", endpoint.completions),
            web.post("/v1/chat/completions", endpoint.chat_completions),
        ]
    )
    return app


class _Endpoint:
    """What each path answers."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def health(self, request: web.Request) -> web.Response:
        """Says which engines answer; status 503 when none does. Causes are for the logs, not for everyone."""
        router = self._served.router
        living, lost = router.living, router.lost
        body = {"status": "ok" if living else "no engine answers", "replicas": len(living), "lost": len(lost)}
        return web.json_response(body, status=200 if living else 503)

    async def models(self, request: web.Request) -> web.Response:
        """The one model."""
        model = {
            "id": self._served.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "nemorl",
            "max_model_len": self._served.max_sequence_length,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continue prompts."""
        asked = read_request(CompletionRequest, await request.read())
        self._check_model(asked.model)
        return await self._answer(
            request, asked, await asyncio.to_thread(completion_work, asked, self._served)
        )

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """The assistant's next message."""
        asked = read_request(ChatRequest, await request.read())
        self._check_model(asked.model)
        return await self._answer(request, asked, await asyncio.to_thread(chat_work, asked, self._served))

    def _check_model(self, name: str) -> None:
        if name != self._served.model_name:
            raise ApiError(
                404,
                f"The model `{name}` is not served; `{self._served.model_name}` is.",
                param="model",
                code="model_not_found",
            )

    async def _answer(
        self, request: web.Request, asked: CompletionRequest | ChatRequest, work: Work
    ) -> web.StreamResponse:
        answer = Answer(asked, work, self._served)
        if asked.stream:
            return await self._stream(request, asked, work, answer)
        completions = await sample(engine_requests(asked, work, self._served), self._served.router)
        return web.json_response(answer.whole(completions))

    async def _stream(
        self, request: web.Request, asked: CompletionRequest | ChatRequest, work: Work, answer: Answer
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        items = stream(engine_requests(asked, work, self._served), self._served.router)
        async with aclosing(items):
            try:
                async for index, item in items:
                    choice = answer.choices[index]
                    part = choice.last_delta(item) if isinstance(item, Completion) else choice.delta(item)
                    first = not response.prepared
                    if first:
                        await response.prepare(request)
                    await _send(response, answer.chunk(part, first=first))
            except ApiError as error:
                if not response.prepared:
                    raise
                await _send(response, error.body())  # the status has been sent: report it in the stream
                return response
        if asked.stream_options is not None and asked.stream_options.include_usage:
            await _send(response, answer.last_chunk())
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")


SHUTDOWN_SECONDS = 5.0
AppOf = Callable[[str], web.Application]  # by the key that requests must send


@dataclass(frozen=True)
class Listening:
    """Address and key of an endpoint."""

    url: str  # with /v1, as clients expect it
    api_key: str
    generated: bool  # the key was generated here, so it has to be shown


def api_key_of(config: EndpointConfig) -> str | None:
    """The key that the config names; None when one is to be made. Raises RunError."""
    if config.api_key_env is None:
        if not config.on_this_machine_only:
            raise RunError(
                f"generation.endpoint.host = {config.host} is reached from other machines, so the key must "
                "be yours: name its environment variable in generation.endpoint.api_key_env, or listen on "
                "127.0.0.1"
            )
        return None
    key = os.environ.get(config.api_key_env, "")
    if not key.strip():
        raise RunError(
            f"generation.endpoint.api_key_env = {config.api_key_env}: this environment variable is not set, "
            "or empty; it holds the key that clients must send"
        )
    return key.strip()


def listening(config: EndpointConfig, served: Served) -> AbstractAsyncContextManager[Listening]:
    """Answer OpenAI's requests while the block runs. Raises RunError when the address cannot be had."""

    def app_of(api_key: str) -> web.Application:
        return make_app(
            served,
            api_key=api_key,
            max_concurrent=config.max_concurrent_requests,
            max_body_bytes=config.max_body_megabytes * 2**20,
        )

    return answering(config, app_of)


@asynccontextmanager
async def answering(
    config: EndpointConfig, app_of: AppOf, inside: str | None = None
) -> AsyncIterator[Listening]:
    """Answer requests while the block runs, by the application of a key.

    `inside` is an address to listen at instead, for our own clients, which receive the generated key.
    Raises RunError when the address cannot be had.
    """
    given = api_key_of(config) if inside is None else None
    listens = inside or config.host
    key = given or secrets.token_urlsafe(32)
    # Who goes away cancels what was asked, so that no engine samples for a closed connection.
    runner = web.AppRunner(
        app_of(key), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, listens, config.port).start()
        except OSError as error:
            reason = error.strerror or error
            raise RunError(
                f"generation.endpoint: cannot listen on {listens}:{config.port}: {reason}"
            ) from error
        host, port = runner.addresses[0][:2]
        shown = f"[{host}]" if ":" in host else host
        yield Listening(f"http://{shown}:{port}/v1", key, generated=given is None)
    finally:
        await runner.cleanup()
