"""A folder behind HTTP, as an object store is: ranges of objects, and failures on request."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web


@dataclass
class StoreServer:
    url: str = ""
    reads: list[tuple[str, int]] = field(default_factory=list)  # answered: path, bytes
    fails: Callable[[str], int | None] = lambda path: None  # status of an answer instead of the object
    has_ranges: bool = True

    def bytes_of(self, suffix: str) -> int:
        return sum(size for path, size in self.reads if path.endswith(suffix))


@contextmanager
def serving(folder: Path) -> Iterator[StoreServer]:
    server, started, loop = StoreServer(), threading.Event(), asyncio.new_event_loop()

    async def answer(request: web.Request) -> web.StreamResponse:
        path = folder / request.match_info["path"]
        status = server.fails(request.path)
        if status is not None:
            return web.Response(status=status)
        if path.is_dir():
            links = "".join(f'<a href="{one.name}">{one.name}</a>' for one in path.iterdir())
            return web.Response(text=links, content_type="text/html")
        if not path.is_file():
            return web.Response(status=404)
        content, wanted = path.read_bytes(), request.http_range
        part = content[wanted] if server.has_ranges else content
        server.reads.append((request.path, len(part)))
        return web.Response(body=part, status=206 if len(part) < len(content) else 200)

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
