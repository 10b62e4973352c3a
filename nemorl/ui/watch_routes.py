"""Routes of the screen that watches a run."""

from aiohttp import web


def add_routes(app: web.Application) -> None: ...
