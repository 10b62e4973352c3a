"""Routes of the screen that reads trajectories."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from .answers import arrays_answer, json_answer
from .context import integer, run_of
from .errors import UiError
from .search import answers, search
from .tokens import Tokenizers, TrajectoryView, view_trajectory
from .trajectories import Query, Series, Tables, TrajectoryTable

TABLES = web.AppKey("tables", Tables)
TOKENIZERS = web.AppKey("tokenizers", Tokenizers)
MAX_ANSWERS = 200
T = TypeVar("T")


def add_routes(app: web.Application) -> None:
    app[TABLES], app[TOKENIZERS] = Tables(), Tokenizers()
    app.router.add_get("/api/read/table", _table)
    app.router.add_get("/api/read/rows", _rows)
    app.router.add_get("/api/read/page", _page)
    app.router.add_get("/api/read/histogram", _histogram)
    app.router.add_get("/api/read/trajectory", _trajectory)
    app.router.add_get("/api/read/group", _group)
    app.router.add_get("/api/read/task", _task)
    app.router.add_get("/api/read/search", _search)


async def _of_table(request: web.Request, ask: Callable[[Path, TrajectoryTable], T]) -> T:
    """Ask the table of the run that a request names, in a thread."""
    run = run_of(request)
    rows = integer(request, "rows") if "rows" in request.query else None
    tables = request.app[TABLES]
    return await asyncio.to_thread(lambda: ask(run, tables.open(run, rows)))


def _query(request: web.Request) -> Query:
    sort = request.query.get("sort", "")
    return Query(request.query.get("filter", ""), sort.removeprefix("-"), sort.startswith("-"))


def _series(request: web.Request) -> Series:
    return Series(request.query.get("phase", "training"), request.query.get("set", ""))


async def _table(request: web.Request) -> web.Response:
    """What the table has, and the counts of its texts over its rows; a wrong filter leaves all."""

    def ask(run: Path, table: TrajectoryTable) -> object:
        problem = None
        try:
            parsed, mask = table.matching(request.query.get("filter", ""))
        except UiError as error:
            problem = error.body()
            parsed, mask = table.matching("")
        return {
            "problem": problem,
            "rows": len(table),
            "matching": int(mask.sum()),
            "columns": table.kinds,
            "source": table.source,
            "notes": table.notes,
            "remarks": parsed.remarks,
            "counts": table.counts(parsed.text),
        }

    return json_answer(await _of_table(request, ask))


async def _rows(request: web.Request) -> web.Response:
    """The number of rows that the run has now."""
    run = run_of(request)
    return json_answer({"rows": await asyncio.to_thread(request.app[TABLES].count, run)})


async def _page(request: web.Request) -> web.Response:
    query = _query(request)
    offset, count = integer(request, "offset", 0), integer(request, "count", 100)
    return json_answer(await _of_table(request, lambda _, table: table.page(query, offset, count)))


async def _histogram(request: web.Request) -> web.Response:
    text, column = request.query.get("filter", ""), request.query.get("column", "reward")
    bins = integer(request, "bins", 40)
    return json_answer(await _of_table(request, lambda _, table: table.histogram(text, column, bins)))


def _number(request: web.Request, table: TrajectoryTable) -> int:
    """The row of the trajectory that a request names."""
    step, group, sample = (integer(request, name) for name in ("step", "group", "sample"))
    return table.find(step, group, sample, _series(request))


async def _trajectory(request: web.Request) -> web.Response:
    branch = integer(request, "branch", 0)
    tokenizers = request.app[TOKENIZERS]

    def ask(run: Path, table: TrajectoryTable) -> TrajectoryView:
        number = _number(request, table)
        row = table.rows([number])[0]
        if table.source == "samples":
            notes = [table.notes[0]]
            return TrajectoryView(row, [], conversation=table.sample(number), notes=notes)
        return view_trajectory(run, row, tokenizers, branch)

    view = await _of_table(request, ask)
    return await asyncio.to_thread(lambda: arrays_answer(view.arrays, view.facts()))


async def _group(request: web.Request) -> web.Response:
    """The answers of a trajectory's group."""
    tokenizers = request.app[TOKENIZERS]

    def ask(run: Path, table: TrajectoryTable) -> object:
        rows = table.siblings(_number(request, table))
        return {"answers": answers(run, table, rows[:MAX_ANSWERS], tokenizers), "count": len(rows)}

    return json_answer(await _of_table(request, ask))


async def _task(request: web.Request) -> web.Response:
    """The answers to a task from the first step to the last."""
    task, series = integer(request, "task"), _series(request)
    offset, count = integer(request, "offset", 0), min(integer(request, "count", 20), MAX_ANSWERS)
    tokenizers = request.app[TOKENIZERS]
    kept = {"stored": request.query.get("stored") == "1", "each": request.query.get("each") == "1"}

    def ask(run: Path, table: TrajectoryTable) -> object:
        page = table.of_task(task, series, offset, count, **kept)
        return {
            "answers": answers(run, table, page.rows, tokenizers),
            "count": page.matching,
            "trend": table.trend(task, series),
        }

    return json_answer(await _of_table(request, ask))


async def _search(request: web.Request) -> web.Response:
    query, text, start = _query(request), request.query.get("text", ""), integer(request, "start", 0)
    tokenizers = request.app[TOKENIZERS]
    return json_answer(
        await _of_table(
            request, lambda run, table: search(run, table, query, text, tokenizers, max(0, start))
        )
    )
