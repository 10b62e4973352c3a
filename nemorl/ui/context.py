"""What the routes of all screens share: keys of the application, and parameters of requests."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, get_args

from aiohttp import web

from .errors import UiError
from .folders import Folders
from .series import Axis, MetricsFiles

FOLDERS = web.AppKey("folders", Folders)
METRICS = web.AppKey("metrics", MetricsFiles)
READ_ONLY = web.AppKey("read_only", bool)


def run_of(request: web.Request) -> Path:
    """The folder of the run that a request names. Raises UiError, as all of these."""
    return request.app[FOLDERS].run(request.query.get("run", ""))


def integer(request: web.Request, name: str, default: int | None = None) -> int:
    text = request.query.get(name, "")
    try:
        if not text and default is not None:
            return default
        if len(text) > 18:
            raise ValueError
        return int(text)
    except ValueError:
        raise UiError(400, f"{name} = {text!r} is no integer", name) from None


def number(request: web.Request, name: str) -> float | None:
    """A finite one; None where the request has none."""
    text = request.query.get(name)
    if text is None:
        return None
    with suppress(ValueError):
        if math.isfinite(found := float(text)):
            return found
    raise UiError(400, f"{name} = {text!r} is no finite number", name)


def smoothing_of(request: web.Request) -> float:
    """The weight of the moving average; 0 where the request has none."""
    smoothing = number(request, "smoothing") or 0.0
    if not 0 <= smoothing < 1:
        raise UiError(400, f"smoothing = {smoothing:g} is not in [0, 1)", "smoothing")
    return smoothing


def axis_of(request: web.Request) -> Axis:
    axis, axes = request.query.get("axis", "step"), get_args(Axis)
    if axis not in axes:
        raise UiError(400, f"axis = {axis!r} is none", "axis", f"choose one of {', '.join(axes)}")
    return cast(Axis, axis)


async def body_of(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        body = await request.json()
    except ValueError:
        raise UiError(400, "the request is not JSON") from None
    if not isinstance(body, dict):
        raise UiError(400, "the request is no JSON object")
    return body
