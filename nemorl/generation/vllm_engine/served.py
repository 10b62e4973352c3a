"""Routes by which a run gives weights to a `vllm serve` that others started. docs/vllm.md.

    run ── POST /nemorl/receive, version ──▶ this middleware ── collective_rpc ──▶ `ServedWorker`, of workers
                                                                                   └── reads files, s3://, ...

vLLM imports it in the server's process (`--middleware`). It requires the key that guards vLLM's own routes
(`VLLM_API_KEY`), and reads weights from the address that the server's owner has set (`NEMORL_WEIGHTS_URL`)
and from no other, so a request names only a version.
"""

import asyncio
import hmac
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

KEY, URL = "VLLM_API_KEY", "NEMORL_WEIGHTS_URL"
PREFIX = "/nemorl/"
_POLL_SECONDS = 0.1

logger = logging.getLogger(__name__)


class WeightRoutes:
    """ASGI middleware. A failed update in place leaves the engine paused until one succeeds."""

    def __init__(self, app: ASGIApp) -> None:
        """Raises ValueError if the server has no key, or no address of weights."""
        self._app = app
        self._key, self._url = (os.environ.get(name, "").strip() for name in (KEY, URL))
        for name, value, what in (
            (KEY, self._key, "the key of this server; without one any process could replace the weights"),
            (URL, self._url, "the folder or URL of fsspec that it reads weights from"),
        ):
            if not value:
                raise ValueError(f"{name} is not set, or empty: set it to {what}")
        self._update = "staged"
        self._paused = False
        self._lock = asyncio.Lock()  # one request at a time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        answer, status = await self._answer(scope, receive)
        await JSONResponse(answer, status_code=status)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[dict[str, Any], int]:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), self._key.encode()):
            return _error("the key is missing or wrong"), 401
        routes = {
            "describe": self.describe,
            "prepare": self.prepare,
            "receive": self.receive,
            "commit": self.commit,
            "abandon": self.abandon,
        }
        route = routes.get(scope["path"].removeprefix(PREFIX))
        if route is None or scope["method"] != "POST":
            return _error(
                f"there is no such route; POST to {', '.join(PREFIX + name for name in routes)}"
            ), 404
        try:
            body = json.loads(await Request(scope, receive).body() or b"{}")
            async with self._lock:
                return await route(scope["app"].state.engine_client, body), 200
        except (KeyError, TypeError, ValueError) as error:
            return _error(f"{type(error).__name__}: {error}"), 400
        except Exception as error:
            logger.exception("%s failed", scope["path"])
            return _error(f"{type(error).__name__}: {error}"), 422  # a retry would not help

    async def describe(self, engine: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """{update} -> {workers: layout of each, version: of the weights in use}."""
        self._update = body["update"]
        workers = await engine.collective_rpc("nemorl_describe", args=(self._update,))
        return {
            "workers": [json.loads(worker) for worker in workers],
            "version": await engine.get_weight_version(),
        }

    async def prepare(self, engine: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """{parts}, JSON of the exchange."""
        await engine.collective_rpc("nemorl_prepare", args=(json.dumps(body["parts"]),))
        return {}

    async def receive(self, engine: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """{session} -> {answers: a report or an error of each worker}. Reads from this server's address."""
        session = json.dumps({**body["session"], "transport": "files", "place": self._url})
        if self._update == "in_place":
            await self._pause(engine)
        await engine.collective_rpc("nemorl_begin", args=(session,))
        async with asyncio.timeout(body["session"]["deadline_seconds"]):
            while None in (answers := await engine.collective_rpc("nemorl_report")):
                await asyncio.sleep(_POLL_SECONDS)
        return {"answers": [json.loads(answer) for answer in answers]}

    async def commit(self, engine: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """{version, recompute}: the weights become those in use. With `recompute`, running sequences continue
        with a KV cache of the new weights."""
        version = int(body["version"])
        await self._pause(engine)
        await engine.collective_rpc("nemorl_commit", args=(version,))
        await engine.reset_prefix_cache(bool(body["recompute"]))
        await engine.update_weight_version(str(version))
        await self._resume(engine)
        return {}

    async def abandon(self, engine: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """-> {corruption: why the weights in use are not of one version, or null}."""
        reasons = [one for one in await engine.collective_rpc("nemorl_abandon") if one is not None]
        if not reasons:
            await self._resume(engine)
        return {"corruption": reasons[0] if reasons else None}

    async def _pause(self, engine: Any) -> None:
        if not self._paused:
            await engine.pause_generation(mode="keep", clear_cache=False)
            self._paused = True

    async def _resume(self, engine: Any) -> None:
        if self._paused:
            await engine.resume_generation()
            self._paused = False


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}  # the shape of vLLM's own
