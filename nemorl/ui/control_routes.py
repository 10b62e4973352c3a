"""Routes that start, stop and resume runs. With `--read-only` there are none."""

import asyncio

from aiohttp import web

from .answers import json_answer
from .context import FOLDERS, READ_ONLY, body_of
from .control import Control, cancel_job, stop
from .errors import UiError

CONTROL = web.AppKey("control", Control)


def add_routes(app: web.Application) -> None:
    if app[READ_ONLY]:
        return
    app[CONTROL] = Control(app[FOLDERS])
    app.router.add_post("/api/control/start", _start)
    app.router.add_post("/api/control/stop", _stop)
    app.router.add_post("/api/control/resume", _resume)
    app.router.add_post("/api/control/cancel", _cancel)


async def _start(request: web.Request) -> web.Response:
    body = await body_of(request)
    config = request.app[FOLDERS].file(str(body.get("file", "")))
    if not config.is_file():
        raise UiError(404, f"{config} is no file", "file", "save the experiment first")
    return json_answer(await request.app[CONTROL].start(config, str(body.get("id", ""))))


async def _stop(request: web.Request) -> web.Response:
    run = str((await body_of(request)).get("run", ""))
    folder = request.app[FOLDERS].run(run)
    return json_answer({"pid": await asyncio.to_thread(stop, run, folder)})


async def _resume(request: web.Request) -> web.Response:
    body = await body_of(request)
    run = str(body.get("run", ""))
    folder = request.app[FOLDERS].run(run)
    return json_answer(await request.app[CONTROL].resume(run, folder, str(body.get("id", ""))))


async def _cancel(request: web.Request) -> web.Response:
    run = str((await body_of(request)).get("run", ""))
    folder = request.app[FOLDERS].run(run)
    return json_answer({"jobs": await asyncio.to_thread(cancel_job, run, folder)})
