"""The HTTP application: who may ask, how much at a time, and the routes.

GET  /health               whether engines answer; asks for no key
GET  /v1/models            the model
POST /v1/completions       a prompt, as text or token ids
POST /v1/chat/completions  a conversation, with tools
"""

import asyncio
import json
from contextlib import aclosing
from typing import Any

from aiohttp import web

from nemorl.generation.types import Completion

from .answers import Answer
from .errors import ApiError
from .guard import at_a_time, errors_as_json, key_wanted
from .reading import read_request
from .requests import ChatRequest, CompletionRequest
from .sampling import Served, Work, chat_work, completion_work, engine_requests, sample, stream


def make_app(served: Served, *, api_key: str, max_concurrent: int, max_body_bytes: int) -> web.Application:
    """The application. Every path but /health wants `Authorization: Bearer <api_key>`."""
    app = web.Application(
        client_max_size=max_body_bytes,
        middlewares=[errors_as_json, key_wanted(api_key), at_a_time(max_concurrent)],
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
