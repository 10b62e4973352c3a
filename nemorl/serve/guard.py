"""What every endpoint does before and after it answers: the key, the most requests at a time, refusals."""

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from .errors import ApiError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal in one shape; what is our own mistake goes to the log, not to who asked."""
    try:
        return await handler(request)
    except ApiError as error:
        headers = {"Retry-After": "1"} if error.status == 429 else {}
        return web.json_response(error.body(), status=error.status, headers=headers)
    except web.HTTPRequestEntityTooLarge as error:
        refusal = ApiError(413, f"The body is too large: {error.text}.", code="body_too_large")
        return web.json_response(refusal.body(), status=error.status)
    except web.HTTPException as error:  # no such path or method
        refusal = ApiError(error.status, f"{request.method} {request.path}: {error.reason}.")
        return web.json_response(refusal.body(), status=error.status)
    except ConnectionResetError:  # who asked has gone away
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return web.json_response(
            ApiError(500, "The server failed; its log says how.", kind="server_error").body(), status=500
        )


def key_wanted(api_key: str) -> Any:
    """Refuses who does not send `Authorization: Bearer <api_key>`, but for /health."""
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        # In constant time, so that nobody finds the key byte by byte.
        if request.path != "/health" and not hmac.compare_digest(given, expected):
            raise ApiError(
                401,
                "A key is wanted: send it as `Authorization: Bearer <key>`.",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return await handler(request)

    return check


def at_a_time(most: int) -> Any:
    """Tells who asks beyond so many requests under way to come again."""
    running = 0

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal running
        if request.method != "POST":
            return await handler(request)
        if running >= most:
            raise ApiError(
                429,
                f"{most} requests are being answered; try again.",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )
        running += 1
        try:
            return await handler(request)
        finally:
            running -= 1

    return count
