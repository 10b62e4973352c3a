"""A stand-in of a server that scores: answers what a test sets, and keeps what it was asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

KEY = "sesame"


@dataclass
class StandIn:
    """`answer` gives a body or a status for each request."""

    answer: Callable[[dict[str, Any]], Any]
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0
    running: int = 0
    paid: Any = None  # what became of its answers
    held: asyncio.Event | None = None  # answers wait for it when given

    async def handle(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "A key is required."}}, status=401)
        body = await request.json()
        self.asked.append(body)
        self.paths.append(request.path)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            await asyncio.sleep(0)
            if self.held is not None:
                await self.held.wait()
            answered = self.answer(body)
        finally:
            self.running -= 1
        if isinstance(answered, int):
            return web.Response(status=answered, text="not now", headers={"Retry-After": "0"})
        text = answered if isinstance(answered, str) else json.dumps(answered)
        return web.Response(text=text, content_type="application/json")


@asynccontextmanager
async def listening(answer: Callable[[dict[str, Any]], Any]) -> AsyncIterator[StandIn]:
    """The stand-in on a free port of this machine."""
    stand_in = StandIn(answer)
    app = web.Application()
    app.router.add_post("/{path:.*}", stand_in.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stand_in.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield stand_in
    finally:
        await runner.cleanup()
