"""Who may ask the web app, and what its pages may load.

It listens on loopback only. A page of another site can still send requests there, under any name that its
DNS gives to 127.0.0.1, so requests of other names, origins and sites are refused, and data requires a token
that only the person who started the server has seen.
"""

import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from html import escape
from typing import Any

from aiohttp import web
from yarl import URL

from .answers import json_answer
from .errors import UiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

API = "/api/"
POLICY = "Content-Security-Policy"
MAX_BODY_BYTES = 4 * 2**20

logger = logging.getLogger(__name__)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>nemorl</title>
<link rel="icon" href="/static/icon.svg">
<link rel="stylesheet" href="/static/style.css">
</head>
<body><main>
<h1>No page at this address</h1>
<p class="problem"><b>{problem}</b></p>
<p>{fix}</p>
</main></body>
</html>
"""


def policy(nonce: str | None = None) -> str:
    """The Content-Security-Policy. Only the editor of a page writes style elements, with the page's nonce."""
    return "; ".join(
        [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'" + (f" 'nonce-{nonce}'" if nonce is not None else ""),
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


@web.middleware
async def errors_as_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer with the sentence of a refusal; defects of the server go to its log."""
    try:
        return await handler(request)
    except UiError as error:
        refusal = error
    except web.HTTPRequestEntityTooLarge:
        refusal = UiError(413, f"the request is larger than {MAX_BODY_BYTES // 2**20} MB")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        refusal = UiError(error.status, f"{request.method} {request.path}: {error.reason}")
    except ConnectionResetError:  # the page is gone
        raise
    except OSError as error:  # of a folder of the user's
        refusal = UiError(422, error.strerror or str(error), str(error.filename or ""))
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        refusal = UiError(500, "the server failed", "", "the terminal of nemorl ui says how")
    if request.path.startswith(API) or "text/html" not in request.headers.get("Accept", ""):
        return json_answer(refusal.body(), refusal.status)
    return _page_of(refusal)


def _page_of(refusal: UiError) -> web.Response:
    """For an address that a person has opened."""
    start = '<a href="/">Start with the list of runs</a>'
    text = _PAGE.format(problem=escape(refusal.message), fix=escape(refusal.fix) or start)
    return web.Response(text=text, content_type="text/html", status=refusal.status)


@web.middleware
async def compress_scripts(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Compress files of pages, which would take seconds through a slow `ssh -L`."""
    response = await handler(request)
    takes_gzip = "gzip" in request.headers.get("Accept-Encoding", "")
    is_known = "If-None-Match" in request.headers or "If-Modified-Since" in request.headers  # 304 has no body
    if request.path.startswith("/static/") and takes_gzip and not is_known:
        response.enable_compression(web.ContentCoding.gzip)
    return response


@web.middleware
async def same_site_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse other hosts (DNS rebinding), origins and sites, whatever the method."""
    host = request.headers.get("Host", "")
    if not _is_loopback(host):
        fix = "open the address that nemorl ui printed; through `ssh -L` any port of localhost works"
        raise UiError(403, f"the host {host!r} is not this machine's loopback address", "Host", fix)
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{host}":
        raise UiError(403, f"the origin {origin!r} is another site", "Origin")
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        fix = "copy the address that nemorl ui printed into a new tab"
        raise UiError(403, "the request was made by another site", "Sec-Fetch-Site", fix)
    return await handler(request)


def require_token(token: str) -> Any:
    """Refuse requests of data without `Authorization: Bearer <token>`."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path.startswith(API) and not hmac.compare_digest(given, expected):
            fix = "open the whole address that nemorl ui printed, with what follows #"
            raise UiError(401, "the token of this server is required", "Authorization", fix)
        return await handler(request)

    return check


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    added = {
        POLICY: policy(),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store" if request.path.startswith(API) else "no-cache",
    }
    for name, value in added.items():
        response.headers.setdefault(name, value)


def _is_loopback(host: str) -> bool:
    """Whether a Host header, with any port, is a name of this machine for itself."""
    try:
        name = URL(f"http://{host}/").host or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
