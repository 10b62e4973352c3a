"""Requests to the web app in the process of a test."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from aiohttp.test_utils import TestClient, TestServer

from nemorl.ui.app import application
from nemorl.ui.folders import Folders

TOKEN = "a-token-of-tests"
KEY = {"Authorization": f"Bearer {TOKEN}"}

T = TypeVar("T")
Client = TestClient[Any, Any]


def asked(root: Path, work: Callable[[Client], Awaitable[T]], **options: Any) -> T:
    """What `work` returns, with a client of a server for this folder."""

    async def run() -> T:
        async with TestClient(TestServer(application(Folders(root), TOKEN, **options))) as client:
            return await work(client)

    return asyncio.run(run())


def get(root: Path, path: str, headers: dict[str, str] | None = None, **params: str) -> tuple[int, Any]:
    """Status and JSON of one request, with the token if no other headers are given."""

    async def work(client: Client) -> tuple[int, Any]:
        answer = await client.get(path, params=params, headers=KEY if headers is None else headers)
        return answer.status, await answer.json()

    return asked(root, work)
