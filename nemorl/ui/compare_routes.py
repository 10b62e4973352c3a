"""Routes of the screen that compares runs."""

import asyncio
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

from .answers import arrays_answer, json_answer
from .compare import MAX_RUNS, Curves, config_differences, pair_tasks, same_data
from .context import FOLDERS, METRICS, axis_of, integer, smoothing_of
from .errors import UiError
from .read_routes import MAX_ANSWERS, TABLES, TOKENIZERS
from .search import answers

CURVES = web.AppKey("curves", Curves)


def add_routes(app: web.Application) -> None:
    app[CURVES] = Curves(app[METRICS])
    app.router.add_get("/api/compare/metrics", _metrics)
    app.router.add_get("/api/compare/curves", _curves)
    app.router.add_get("/api/compare/configs", _configs)
    app.router.add_get("/api/compare/tasks", _tasks)
    app.router.add_get("/api/compare/answers", _answers)


def _runs(request: web.Request) -> dict[str, Path]:
    """The runs that a request names, in their order. Raises UiError."""
    names = [unquote(name) for name in dict.fromkeys(request.query.get("runs", "").split(",")) if name]
    if not names or len(names) > MAX_RUNS:
        fix = "mark them in the list of runs"
        raise UiError(400, f"{len(names)} runs are named, of 1 to {MAX_RUNS}", "runs", fix)
    return {name: request.app[FOLDERS].run(name) for name in names}


def _two(request: web.Request) -> dict[str, Path]:
    runs = _runs(request)
    if len(runs) != 2:
        raise UiError(400, f"{len(runs)} runs are named, and two are paired", "runs", "choose two runs")
    return runs


async def _metrics(request: web.Request) -> web.Response:
    """Names of the metrics of all runs, and what is wrong with their files."""
    curves, runs = request.app[CURVES], _runs(request)
    return json_answer(await asyncio.to_thread(curves.names, runs))


async def _curves(request: web.Request) -> web.Response:
    """A metric in the runs that have it, as `Curves.of` gives it."""
    curves, runs, metric = request.app[CURVES], _runs(request), request.query.get("metric", "")
    axis, smoothing = axis_of(request), smoothing_of(request)

    def ask() -> web.Response:
        return arrays_answer(*curves.of(runs, metric, axis, smoothing))

    return await asyncio.to_thread(ask)


async def _configs(request: web.Request) -> web.Response:
    return json_answer(await asyncio.to_thread(config_differences, _runs(request)))


async def _tasks(request: web.Request) -> web.Response:
    runs, tables = _two(request), request.app[TABLES]
    text, last = request.query.get("filter", ""), request.query.get("last", "1") == "1"

    def ask() -> object:
        first, second = (tables.open(run) for run in runs.values())
        paired = pair_tasks(first, second, text, last=last)
        if same_data(list(runs.values())) is False:
            paired.notes.append("The runs have another data.train: a number may be another task in each.")
        return paired

    return json_answer(await asyncio.to_thread(ask))


async def _answers(request: web.Request) -> web.Response:
    """Answers to a task in each of two runs, those of its last step."""
    runs, tables, tokenizers = _two(request), request.app[TABLES], request.app[TOKENIZERS]
    task, of_set, text = (
        integer(request, "task"),
        request.query.get("set", ""),
        request.query.get("filter", ""),
    )

    def ask() -> object:
        found = []
        for run in runs.values():
            table = tables.open(run)
            rows = table.last_of_task(task, of_set, text)
            found.append(answers(run, table, rows[:MAX_ANSWERS], tokenizers))
        return found

    return json_answer(await asyncio.to_thread(ask))
