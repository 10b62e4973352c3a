"""The HTTP application: access, limits, routes (`_Endpoint`), and listening at an address."""

import asyncio
import hmac
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from nemorl.config.generation import EndpointConfig
from nemorl.errors import RunError
from nemorl.generation.types import Completion

from .answers import Answer
from .requests import ApiError, ChatRequest, CompletionRequest, read_request
from .sampling import Served, Work, chat_work, completion_work, engine_requests, sample, stream

log = logging.getLogger(__name__)

R = TypeVar("R", CompletionRequest, ChatRequest)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
AddRoutes = Callable[[web.Application], None]
SHUTDOWN_SECONDS = 5.0


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every refusal the same shape; defects of the server go to the log, not to the client."""
    try:
        return await handler(request)
    except ApiError as error:
        refusal = error
    except web.HTTPRequestEntityTooLarge as error:
        refusal = ApiError(413, f"The body is too large: {error.text}.", code="body_too_large")
    except web.HTTPException as error:  # no such path or method
        refusal = ApiError(error.status, f"{request.method} {request.path}: {error.reason}.")
    except ConnectionResetError:  # the client is gone
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        refusal = ApiError(500, "The server failed; its log says how.", kind="server_error")
    headers = {"Retry-After": "1"} if refusal.status == 429 else {}
    return web.json_response(refusal.body(), status=refusal.status, headers=headers)


def require_key(api_key: str) -> Any:
    """Refuse requests without `Authorization: Bearer <api_key>`, except for /health."""
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        # In constant time, so that timing does not reveal the key.
        if request.path != "/health" and not hmac.compare_digest(given, expected):
            message = "A key is required. Send it as `Authorization: Bearer <key>`."
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key")
        return await handler(request)

    return check


def limit_concurrency(limit: int) -> Any:
    """Refuse requests beyond the limit, with status 429."""
    running = 0

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal running
        if request.method != "POST":
            return await handler(request)
        if running >= limit:
            message = f"{limit} requests are being answered; try again."
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")
        running += 1
        try:
            return await handler(request)
        finally:
            running -= 1

    return count


class _Endpoint:
    def __init__(self, served: Served) -> None:
        self._served = served

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/health", self.health)  # needs no key
        app.router.add_get("/v1/models", self.models)
        completions = partial(self.complete, CompletionRequest, completion_work)
        app.router.add_post("/v1/completions", completions)
        app.router.add_post("/v1/chat/completions", partial(self.complete, ChatRequest, chat_work))

    async def health(self, request: web.Request) -> web.Response:
        """Count the engines that answer; status 503 when none does. Causes are for the logs only."""
        living, lost = self._served.router.living, self._served.router.lost
        body = {"status": "ok" if living else "no engine answers", "replicas": len(living), "lost": len(lost)}
        return web.json_response(body, status=200 if living else 503)

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self._served.model_name, "object": "model", "created": 0, "owned_by": "nemorl"}
        model |= {"max_model_len": self._served.max_sequence_length}
        return web.json_response({"object": "list", "data": [model]})

    async def complete(
        self, kind: type[R], work_of: Callable[[R, Served], Work], request: web.Request
    ) -> web.StreamResponse:
        body = read_request(kind, await request.read(), self._served.model_name)
        work = await asyncio.to_thread(work_of, body, self._served)
        answer = Answer(body, work, self._served)
        requests = engine_requests(body, work, self._served)
        if not body.stream:
            return web.json_response(answer.whole(await sample(requests, self._served.router)))
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"

        async def send(event: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")

        async with aclosing(stream(requests, self._served.router)) as items:
            try:
                async for index, item in items:
                    choice = answer.choices[index]
                    part = choice.last_delta(item) if isinstance(item, Completion) else choice.delta(item)
                    first = not response.prepared
                    if first:
                        await response.prepare(request)
                    await send(answer.chunk(part, first=first))
            except ApiError as error:
                if not response.prepared:
                    raise
                await send(error.body())  # the status has been sent: report it in the stream
                return response
        if body.stream_options is not None and body.stream_options.include_usage:
            await send(answer.last_chunk())
        await response.write(b"data: [DONE]\n\n")
        return response


@dataclass(frozen=True)
class Listening:
    url: str  # with /v1, as clients expect it
    api_key: str
    generated: bool  # the key was generated here, so it has to be shown


def listening(config: EndpointConfig, served: Served) -> AbstractAsyncContextManager[Listening]:
    return answering(config, _Endpoint(served).add_routes)


@asynccontextmanager
async def answering(
    config: EndpointConfig, add_routes: AddRoutes, inside: str | None = None
) -> AsyncIterator[Listening]:
    """Answer requests while the block runs. Every path but /health requires the key.

    `inside` is an address to listen at instead, for our own clients, which receive a generated key. Raises
    RunError when the address is not available or the configured key is not set.
    """
    key = secrets.token_urlsafe(32)
    generated = inside is not None or config.api_key_env is None
    if not generated:
        key = os.environ.get(str(config.api_key_env), "").strip()
        if not key:
            problem = "this environment variable is unset or empty; set it to the key that clients must send"
            raise RunError(f"generation.endpoint.api_key_env = {config.api_key_env}: {problem}")
    guards = [errors_as_json, require_key(key), limit_concurrency(config.max_concurrent_requests)]
    app = web.Application(client_max_size=config.max_body_megabytes * 2**20, middlewares=guards)
    add_routes(app)
    # A client that disconnects cancels its request, so that no engine samples for a closed connection.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    address = inside or config.host
    try:
        try:
            await web.TCPSite(runner, address, config.port).start()
        except OSError as error:
            problem = f"generation.endpoint: cannot listen on {address}:{config.port}"
            raise RunError(f"{problem}: {error.strerror or error}") from error
        host, port = runner.addresses[0][:2]
        shown = f"[{host}]" if ":" in host else host
        yield Listening(f"http://{shown}:{port}/v1", key, generated)
    finally:
        await runner.cleanup()
