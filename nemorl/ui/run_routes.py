"""Routes of the list of runs, and facts of the server."""

import asyncio

from aiohttp import web

from .answers import json_answer
from .context import FOLDERS, READ_ONLY
from .runs import RunList

RUN_LIST = web.AppKey("run_list", RunList)


def add_routes(app: web.Application) -> None:
    app[RUN_LIST] = RunList()
    app.router.add_get("/api/server", _server)
    app.router.add_get("/api/runs/list", _list)


async def _server(request: web.Request) -> web.Response:
    return json_answer({"root": request.app[FOLDERS].root, "read_only": request.app[READ_ONLY]})


async def _list(request: web.Request) -> web.Response:
    folders, runs = request.app[FOLDERS], request.app[RUN_LIST]

    def summaries() -> list[object]:
        return [runs.summary(name, path) for name, path in folders.runs()]

    return json_answer(await asyncio.to_thread(summaries))
