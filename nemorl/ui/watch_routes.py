"""Routes of the list of runs, and of the screen that watches one; facts of the server."""

import asyncio
import json
from contextlib import suppress

from aiohttp import web

from nemorl.observe.run_folder import RunPaths

from .answers import arrays_answer, json_answer, to_json
from .context import FOLDERS, METRICS, READ_ONLY, axis_of, number, run_of, smoothing_of
from .errors import UiError
from .logs import read_logs
from .runs import RunList
from .series import shown_series, step_at
from .watching import Watcher, lanes, marks

RUN_LIST = web.AppKey("run_list", RunList)
WATCHER = web.AppKey("watcher", Watcher)
ENDING = web.AppKey("ending", asyncio.Event)  # set when the server ends, which waits for open answers
PERIOD_SECONDS = 0.5  # between two looks at a run's files
QUIET_SECONDS = 5.0  # after which a state is sent although nothing was written, as stages grow older
MAX_PIXELS = 4000


def add_routes(app: web.Application) -> None:
    app[RUN_LIST] = RunList()
    app.router.add_get("/api/server", _server)
    app.router.add_get("/api/runs/list", _list)
    app[WATCHER], app[ENDING] = Watcher(app[METRICS]), asyncio.Event()
    app.on_shutdown.append(_end)
    app.router.add_get("/api/watch/state", _state)
    app.router.add_get("/api/watch/follow", _follow)
    app.router.add_get("/api/watch/series", _series)
    app.router.add_get("/api/watch/step", _step)
    app.router.add_get("/api/watch/lanes", _lanes)
    app.router.add_get("/api/watch/logs", _logs)
    app.router.add_get("/api/watch/timeline", _timeline)


async def _end(app: web.Application) -> None:
    app[ENDING].set()


async def _server(request: web.Request) -> web.Response:
    return json_answer({"root": request.app[FOLDERS].root, "read_only": request.app[READ_ONLY]})


async def _list(request: web.Request) -> web.Response:
    folders, runs = request.app[FOLDERS], request.app[RUN_LIST]

    def summaries() -> list[object]:
        return [runs.summary(name, path) for name, path in folders.runs()]

    return json_answer(await asyncio.to_thread(summaries))


async def _state(request: web.Request) -> web.Response:
    name, folder = request.query.get("run", ""), run_of(request)
    return json_answer(await asyncio.to_thread(request.app[WATCHER].state, name, folder))


async def _follow(request: web.Request) -> web.StreamResponse:
    """The state as server-sent events: at once, and whenever the run writes."""
    name, folder = request.query.get("run", ""), run_of(request)
    response = web.StreamResponse()
    response.content_type = "text/event-stream"
    await response.prepare(request)
    seen, waited, ending = None, 0.0, request.app[ENDING]
    with suppress(ConnectionResetError):
        while not ending.is_set():
            mark = await asyncio.to_thread(marks, folder)
            if mark != seen or waited >= QUIET_SECONDS:
                seen, waited = mark, 0.0
                state = await asyncio.to_thread(request.app[WATCHER].state, name, folder)
                await response.write(f"data: {to_json(state)}\n\n".encode())
            with suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), PERIOD_SECONDS)
            waited += PERIOD_SECONDS
    return response


async def _series(request: web.Request) -> web.Response:
    """Columns of metrics: `names` is a JSON list of them."""
    folder = run_of(request)
    axis = axis_of(request)
    try:
        names = [str(name) for name in json.loads(request.query.get("names", "[]"))]
    except (ValueError, TypeError):
        raise UiError(400, "names is no list of metrics in JSON", "names") from None
    pixels = int(min(MAX_PIXELS, max(10, number(request, "pixels") or 800.0)))
    smoothing = smoothing_of(request)
    low, high = number(request, "low"), number(request, "high")
    files = request.app[METRICS]

    def series() -> web.Response:
        with files.reading(RunPaths(folder).metrics) as metrics:
            options = {"pixels": pixels, "low": low, "high": high}
            arrays = shown_series(metrics, names, axis=axis, smoothing=smoothing, **options)  # type: ignore[arg-type]
            return arrays_answer(arrays, {"names": names, "axis": axis, "num_steps": len(metrics.steps)})

    return await asyncio.to_thread(series)


async def _step(request: web.Request) -> web.Response:
    """The step at a place on an axis."""
    folder = run_of(request)
    axis, place = axis_of(request), number(request, "at")
    if place is None:
        raise UiError(400, "the request has no place", "at")
    files = request.app[METRICS]

    def step() -> int | None:
        with files.reading(RunPaths(folder).metrics) as metrics:
            return step_at(metrics, axis, place)

    return json_answer({"step": await asyncio.to_thread(step)})


async def _lanes(request: web.Request) -> web.Response:
    folder = run_of(request)
    return json_answer(await asyncio.to_thread(lanes, RunPaths(folder).timeline))


async def _logs(request: web.Request) -> web.Response:
    folder = run_of(request)
    source, find, level = (request.query.get(name, "") for name in ("source", "find", "level"))
    return json_answer(await asyncio.to_thread(read_logs, RunPaths(folder).logs, source, find, level))


async def _timeline(request: web.Request) -> web.StreamResponse:
    path = RunPaths(run_of(request)).timeline
    if not path.is_file():
        raise UiError(404, "this run has no timeline", str(path))
    return web.FileResponse(path, headers={"Content-Disposition": 'attachment; filename="timeline.json"'})
