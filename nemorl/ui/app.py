"""The web application: its pages, the routes of its screens, and serving it until a signal."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from aiohttp import web

from nemorl.errors import RunError
from nemorl.serve.app import listening_at

from . import compare_routes, compose_routes, control_routes, read_routes, watch_routes
from .access import (
    MAX_BODY_BYTES,
    POLICY,
    add_headers,
    compress_scripts,
    errors_as_answers,
    policy,
    require_token,
    same_site_only,
)
from .context import FOLDERS, METRICS, READ_ONLY
from .folders import Folders
from .series import MetricsFiles

SCREENS = ("runs", "compose", "watch", "read", "compare")
STATIC = Path(str(files("nemorl.ui"))) / "static"
_ROUTES = (compose_routes, watch_routes, control_routes, read_routes, compare_routes)


def application(folders: Folders, token: str, *, read_only: bool = False) -> web.Application:
    """Every path below /api/ requires `Authorization: Bearer <token>`."""
    guards: list[Any] = [errors_as_answers, same_site_only, require_token(token), compress_scripts]
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=guards)
    app[FOLDERS], app[METRICS], app[READ_ONLY] = folders, MetricsFiles(), read_only
    app.on_response_prepare.append(add_headers)
    for screen in ("", *SCREENS):
        app.router.add_get(f"/{screen}", _page)
    app.router.add_static("/static", STATIC, follow_symlinks=False)
    for routes in _ROUTES:
        routes.add_routes(app)
    return app


@asynccontextmanager
async def serving(folders: Folders, port: int, *, read_only: bool) -> AsyncIterator[tuple[str, str]]:
    """Answer while the block runs, at the address and with the token that are yielded. Raises RunError."""
    token = secrets.token_urlsafe(32)
    try:
        async with listening_at(application(folders, token, read_only=read_only), "127.0.0.1", port) as url:
            yield url, token
    except OSError as error:
        fix = "choose another --port, or none for a free one"
        raise RunError(f"cannot listen on port {port}: {error.strerror or error}; {fix}") from error


async def _page(request: web.Request) -> web.Response:
    """The one page of all screens, which shows what its address says."""
    nonce = secrets.token_urlsafe(16)
    text = _index().replace("NONCE", nonce)
    return web.Response(text=text, content_type="text/html", headers={POLICY: policy(nonce)})


@cache
def _index() -> str:
    return (STATIC / "index.html").read_text(encoding="utf-8")
