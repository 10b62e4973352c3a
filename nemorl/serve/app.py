"""The HTTP application: who may ask, how much at a time, and the routes.

GET  /health               whether engines answer; asks for no key
GET  /v1/models            the model
POST /v1/completions       a prompt, as text or token ids
POST /v1/chat/completions  a conversation, with tools
"""

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from nemorl.generation.types import Completion

from .answers import Answer
from .errors import ApiError
from .reading import read_request
from .requests import ChatRequest, CompletionRequest
from .sampling import Served, Work, chat_work, completion_work, engine_requests, sample, stream

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(served: Served, *, api_key: str, max_concurrent: int, max_body_bytes: int) -> web.Application:
    """The application. Every path but /health wants `Authorization: Bearer <api_key>`."""
    app = web.Application(
        client_max_size=max_body_bytes,
        middlewares=[_errors_as_json, _key_wanted(api_key), _at_a_time(max_concurrent)],
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
        """Goes on from prompts."""
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
                await _send(response, error.body())  # the status has been sent: tell it in the stream
                return response
        if asked.stream_options is not None and asked.stream_options.include_usage:
            await _send(response, answer.last_chunk())
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
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


def _key_wanted(api_key: str) -> Any:
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def key_wanted(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        # In constant time, so that nobody finds the key byte by byte.
        if request.path != "/health" and not hmac.compare_digest(given, expected):
            raise ApiError(
                401,
                "A key is wanted: send it as `Authorization: Bearer <key>`.",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return await handler(request)

    return key_wanted


def _at_a_time(most: int) -> Any:
    running = 0

    @web.middleware
    async def at_a_time(request: web.Request, handler: Handler) -> web.StreamResponse:
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

    return at_a_time
