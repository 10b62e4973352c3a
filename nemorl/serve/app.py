"""The HTTP application: access, limits, routes (`_Endpoint`), and listening at an address."""

import asyncio
import hmac
import json
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from nemorl.config.generation import EndpointConfig
from nemorl.errors import RunError
from nemorl.generation.types import Completion, GenerationRequest, Generator

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

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health":
            refuse_other_keys(request, api_key)
        return await handler(request)

    return check


def refuse_other_keys(request: web.Request, api_key: str) -> None:
    """Raise ApiError for a request without this key; in constant time, so that timing does not reveal it.

    `X-API-Key` is for clients that cannot choose their `Authorization`.
    """
    own = request.headers.get("X-API-Key")
    given = request.headers.get("Authorization", "") if own is None else f"Bearer {own}"
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {api_key}".encode()):
        message = "A key is required. Send it as `Authorization: Bearer <key>`."
        if given:
            message = "The key is not valid here: it is another one, or its episode has ended."
        raise ApiError(401, message, kind="authentication_error", code="invalid_api_key")


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
        return list_of_models(self._served.model_name, self._served.max_sequence_length)

    async def complete(
        self, kind: type[R], work_of: Callable[[R, Served], Work], request: web.Request
    ) -> web.StreamResponse:
        body = read_request(kind, await request.read(), self._served.model_name)
        work = await asyncio.to_thread(work_of, body, self._served)
        answer = Answer(body, work, self._served.model_name, self._served.tokenizer)
        requests = engine_requests(body, work, self._served)
        return await respond(request, body, answer, requests, self._served.router)


def list_of_models(name: str, max_sequence_length: int) -> web.Response:
    model = {"id": name, "object": "model", "created": 0, "owned_by": "nemorl"}
    model |= {"max_model_len": max_sequence_length}
    return web.json_response({"object": "list", "data": [model]})


async def respond(
    request: web.Request,
    body: CompletionRequest | ChatRequest,
    answer: Answer,
    requests: Sequence[GenerationRequest],
    generator: Generator,
) -> web.StreamResponse:
    """Sample the choices of a request, and answer as a whole or as a stream."""
    if not body.stream:
        return web.json_response(answer.whole(await sample(requests, generator)))
    response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
    response.content_type = "text/event-stream"

    async def send(event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")

    async with aclosing(stream(requests, generator)) as items:
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
    address = inside or config.host
    try:
        async with listening_at(app, address, config.port) as url:
            yield Listening(f"{url}/v1", key, generated)
    except OSError as error:
        problem = f"generation.endpoint: cannot listen on {address}:{config.port}"
        raise RunError(f"{problem}: {error.strerror or error}") from error


def event_at_signals() -> asyncio.Event:
    """Set by SIGINT and SIGTERM, which before that cancel the task of the command (`run_to_end`)."""
    event = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


@asynccontextmanager
async def listening_at(app: web.Application, host: str, port: int = 0) -> AsyncIterator[str]:
    """Answer requests while the block runs, at the address that is yielded. Raises OSError."""
    # A client that disconnects cancels its request, so that no engine samples for a closed connection.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        address, number = runner.addresses[0][:2]
        shown = f"[{address}]" if ":" in address else address
        yield f"http://{shown}:{number}"
    finally:
        await runner.cleanup()
