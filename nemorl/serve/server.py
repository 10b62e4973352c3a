"""Listening: the address, the key, and the end."""

import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from nemorl.config.generation import EndpointConfig
from nemorl.errors import RunError

from .app import make_app
from .sampling import Served

SHUTDOWN_SECONDS = 5.0
AppOf = Callable[[str], web.Application]  # by the key that requests must send


@dataclass(frozen=True)
class Listening:
    """Where an endpoint is, and what it wants to hear."""

    url: str  # with /v1, as clients want it
    api_key: str
    generated: bool  # the key was made here, so somebody has to be told


def api_key_of(config: EndpointConfig) -> str | None:
    """The key that the config names; None when one is to be made. Raises RunError."""
    if config.api_key_env is None:
        if not config.on_this_machine_only:
            raise RunError(
                f"generation.endpoint.host = {config.host} is reached from other machines, so the key must "
                "be yours: name its environment variable in generation.endpoint.api_key_env, or listen on "
                "127.0.0.1"
            )
        return None
    key = os.environ.get(config.api_key_env, "")
    if not key.strip():
        raise RunError(
            f"generation.endpoint.api_key_env = {config.api_key_env}: this environment variable is not set, "
            "or empty; it holds the key that clients must send"
        )
    return key.strip()


def listening(config: EndpointConfig, served: Served) -> AbstractAsyncContextManager[Listening]:
    """Answer OpenAI's requests while the block runs. Raises RunError when the address cannot be had."""

    def app_of(api_key: str) -> web.Application:
        return make_app(
            served,
            api_key=api_key,
            max_concurrent=config.max_concurrent_requests,
            max_body_bytes=config.max_body_megabytes * 2**20,
        )

    return answering(config, app_of)


@asynccontextmanager
async def answering(
    config: EndpointConfig, app_of: AppOf, inside: str | None = None
) -> AsyncIterator[Listening]:
    """Answer requests while the block runs, by the application of a key.

    `inside` is an address to listen at instead, for askers of our own, who are told the key that is made.
    Raises RunError when the address cannot be had.
    """
    given = api_key_of(config) if inside is None else None
    listens = inside or config.host
    key = given or secrets.token_urlsafe(32)
    # Who goes away cancels what was asked, so that no engine samples for nobody.
    runner = web.AppRunner(
        app_of(key), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, listens, config.port).start()
        except OSError as error:
            reason = error.strerror or error
            raise RunError(
                f"generation.endpoint: cannot listen on {listens}:{config.port}: {reason}"
            ) from error
        host, port = runner.addresses[0][:2]
        shown = f"[{host}]" if ":" in host else host
        yield Listening(f"http://{shown}:{port}/v1", key, generated=given is None)
    finally:
        await runner.cleanup()
