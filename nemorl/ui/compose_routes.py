"""Routes of the screen Compose."""

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import web

from nemorl.config.algorithm.online import PRESETS as ALGORITHMS
from nemorl.config.base import LEVELS
from nemorl.config.environment import Signature
from nemorl.config.experiment import Experiment
from nemorl.errors import ConfigError, NemorlError
from nemorl.observe.files import RunFolderError
from nemorl.rewards.find import FORMS
from nemorl.rewards.functions import BUILT_IN

from . import compose
from .answers import json_answer
from .children import Child, ChildError, call_once
from .context import FOLDERS, READ_ONLY, body_of
from .errors import UiError
from .experiment_files import (
    free_name,
    list_experiments,
    read_text,
    regular,
    reward_template,
    save_experiment,
    save_reward,
)
from .yaml_edit import EditError, edit

CHECKER = web.AppKey("checker", Child)
STARTED = web.AppKey("started", list[asyncio.Future[None]])
T = TypeVar("T")
_NEW = "experiment.yaml"  # in whose place a text without a name is checked
_ORDER = tuple(Experiment.model_fields)


def add_routes(app: web.Application) -> None:
    app[STARTED] = []
    app[CHECKER] = Child(app[FOLDERS].root, compose.CHECK_SECONDS)
    app.cleanup_ctx.append(_close_checker)
    get, post = app.router.add_get, app.router.add_post
    get("/api/compose/facts", _facts)
    get("/api/compose/files", _files)
    get("/api/compose/file", _file)
    get("/api/compose/recipe", _recipe)
    get("/api/compose/template", _template)
    post("/api/compose/check", _check)
    post("/api/compose/edit", _edit)
    post("/api/compose/layouts", _layouts)
    post("/api/compose/suggestions", _suggestions)
    post("/api/compose/score", _score)
    if not app[READ_ONLY]:
        post("/api/compose/save", _save)
        post("/api/compose/reward", _save_reward)


def _start_checker(child: Child) -> None:
    with suppress(ChildError):
        child.call(compose.preset_facts)


async def _close_checker(app: web.Application) -> AsyncIterator[None]:
    yield
    await asyncio.gather(*app[STARTED])
    await asyncio.to_thread(app[CHECKER].close)


async def _facts(request: web.Request) -> web.Response:
    """What does not depend on the text: levels, presets of hardware, recipes, kinds of rewards.

    A page that asks for it will soon have a text checked, so the checker starts meanwhile.
    """
    if not request.app[STARTED]:
        starting = asyncio.to_thread(_start_checker, request.app[CHECKER])
        request.app[STARTED].append(asyncio.ensure_future(starting))
    presets, recipes = await asyncio.to_thread(lambda: (compose.preset_facts(), compose.starting_points()))
    words = {name: (function.__doc__ or "").split("\n\n")[0] for name, function in sorted(BUILT_IN.items())}
    return json_answer(
        {
            "levels": LEVELS,
            "presets": presets,
            "recipes": recipes,
            "rewards": words,
            "signatures": FORMS,
            "algorithms": {name: preset.title for name, preset in ALGORITHMS.items()},
            "folder": str(request.app[FOLDERS].root),
        }
    )


async def _files(request: web.Request) -> web.Response:
    return json_answer(await asyncio.to_thread(list_experiments, request.app[FOLDERS]))


async def _file(request: web.Request) -> web.Response:
    name = request.query.get("file", "")
    return json_answer(await asyncio.to_thread(read_text, request.app[FOLDERS], name))


async def _recipe(request: web.Request) -> web.Response:
    """The text of a new experiment, empty without the name of a recipe, and a name that no file has."""
    name, file = request.query.get("name", ""), request.query.get("file") or _NEW
    free = await asyncio.to_thread(free_name, request.app[FOLDERS], file)
    text = await asyncio.to_thread(_refusals, lambda: compose.recipe_text(name)) if name else ""
    return json_answer({"text": text, "file": free})


async def _template(request: web.Request) -> web.Response:
    given, name = request.query.get("signature", "trl"), request.query.get("function", "reward")
    signature: Signature | None = next((one for one in FORMS if one == given), None)
    if signature is None or not name.isidentifier():
        fix = f"choose one of {', '.join(FORMS)}, and a name of letters, digits and _"
        raise UiError(400, f"no template for {given} {name}", "signature", fix)
    return json_answer({"text": reward_template(signature, name)})


async def _check(request: web.Request) -> web.Response:
    body = await body_of(request)
    text, file, preset = _text(body), _path(request, body), _preset(body)

    def checked() -> compose.Json | None:
        return _in_checker(request, compose.check, text, file, preset, newest=True)

    answer = await asyncio.to_thread(checked)
    if answer is None:
        return json_answer({"superseded": True})
    name = str(body.get("file") or _NEW)
    return json_answer({**answer, "command": command(name), "slurm": command(name, slurm=True)})


def command(name: str, *, slurm: bool = False) -> str:
    """What starts the run from a terminal in the current folder."""
    return shlex.join(["nemorl", "slurm", "submit", name] if slurm else ["nemorl", "train", name])


async def _edit(request: web.Request) -> web.Response:
    """The text after edits of single values (see `yaml_edit.edit`)."""
    body = await body_of(request)
    edits = body.get("edits")
    if not isinstance(edits, list) or not all(_is_edit(one) for one in edits):
        raise UiError(400, "expected a list of edits, each with a path", "edits")
    text, file = _text(body), str(request.app[FOLDERS].root / _path(request, body))

    def changed() -> str:
        try:
            return edit(text, compose.own_edits(text, file, edits), _ORDER)
        except EditError as error:
            raise UiError(422, str(error), _dotted(edits)) from error

    return json_answer({"text": await asyncio.to_thread(_refusals, changed)})


async def _layouts(request: web.Request) -> web.Response:
    return await _planned(request, compose.layouts)


async def _suggestions(request: web.Request) -> web.Response:
    return await _planned(request, compose.suggestions)


async def _planned(request: web.Request, function: Callable[..., Any]) -> web.Response:
    body = await body_of(request)
    devices = body.get("devices")
    if devices is not None and not (isinstance(devices, int) and 1 <= devices <= 4096):
        raise UiError(400, f"devices = {devices}: expected an integer from 1 to 4096", "devices")
    text, file, preset = _text(body), _path(request, body), _preset(body)

    def planned() -> Any:
        return _in_checker(request, function, text, file, preset, devices)

    return json_answer(await asyncio.to_thread(planned))


async def _score(request: web.Request) -> web.Response:
    """Rewards of answers: those of a run, of a file of JSON lines, or typed ones."""
    body = await body_of(request)
    text, file, limit = _text(body), _path(request, body), body.get("limit", 512)
    if not isinstance(limit, int) or not 1 <= limit <= 2048:
        raise UiError(400, f"limit = {limit}: expected an integer from 1 to 2048", "limit")
    folders = request.app[FOLDERS]
    kind: compose.AnswersOf = "lines"
    source = str(body.get("answers", ""))
    if run := str(body.get("run", "")):
        kind, source = "path", str(folders.run(run).relative_to(folders.root))
    elif name := str(body.get("lines", "")):
        kind, source = "path", regular(folders, name)

    def scored() -> Any:
        given = text, file, kind, source, limit
        return call_once(compose.score, *given, folder=folders.root, seconds=compose.PREVIEW_SECONDS)

    return json_answer(await asyncio.to_thread(_refusals, scored))


async def _save(request: web.Request) -> web.Response:
    body = await body_of(request)
    name, text, version = str(body.get("file", "")), _text(body), body.get("version")
    return json_answer(await asyncio.to_thread(_written, save_experiment, request, name, text, version))


async def _save_reward(request: web.Request) -> web.Response:
    body = await body_of(request)
    name, text, version = str(body.get("file", "")), _text(body), body.get("version")
    written = await asyncio.to_thread(_written, save_reward, request, name, text, version)
    saved, functions = written
    return json_answer({"version": saved.version, "functions": functions})


def _written(function: Callable[..., T], request: web.Request, *arguments: Any) -> T:
    try:
        return function(request.app[FOLDERS], *arguments)
    except RunFolderError as error:  # of a full or read-only disk
        raise UiError(403, str(error), str(arguments[0])) from error


def _in_checker(
    request: web.Request, function: Callable[..., T], *arguments: Any, newest: bool = False
) -> T | None:
    child = request.app[CHECKER]
    return _refusals(lambda: child.call(function, *arguments, only_newest=newest))


def _refusals(function: Callable[[], T]) -> T:
    """What `function` returns; its errors that a person can correct become answers."""
    try:
        return function()
    except ConfigError as error:
        first = error.problems[0]
        place = first.field + (f" ({first.origin})" if first.origin else "")
        raise UiError(422, first.fix, place, "correct the field in the text") from error
    except NemorlError as error:
        raise UiError(422, str(error)) from error
    except ChildError as error:
        raise UiError(422, str(error), "the code of the experiment") from error


def _text(body: dict[str, Any]) -> str:
    text = body.get("text")
    if not isinstance(text, str):
        raise UiError(400, "the request has no text", "text")
    return text


def _path(request: web.Request, body: dict[str, Any]) -> str:
    """The file in whose place a text is checked, as `nemorl check` in the folder of the app would name it."""
    folders = request.app[FOLDERS]
    return str(folders.file(str(body.get("file") or _NEW)).relative_to(folders.root))


def _preset(body: dict[str, Any]) -> str:
    preset = str(body.get("preset") or "here")
    if preset not in compose.PRESETS:
        raise UiError(400, f"unknown preset {preset}", "preset", f"use one of {', '.join(compose.PRESETS)}")
    return preset


def _is_edit(one: Any) -> bool:
    path = one.get("path") if isinstance(one, dict) else None
    if not isinstance(path, list) or not path:
        return False
    return all(isinstance(step, str | int) and not isinstance(step, bool) for step in path)


def _dotted(edits: list[dict[str, Any]]) -> str:
    return ".".join(map(str, edits[0]["path"])) if edits else ""
