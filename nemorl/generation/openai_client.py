"""A client of OpenAI-compatible servers that tries again where that may help, and counts it."""

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from .types import EngineFailed, RequestRefused

FIRST_WAIT_SECONDS = 0.5
MAX_WAIT_SECONDS = 30.0
CONNECT_SECONDS = 10.0
_SHOWN_CHARACTERS = 300
# Statuses that another attempt may change: too many requests, conflicts and timeouts, failures of the server.
_PASSING = frozenset({408, 409, 425, 429, *range(500, 600)})


class MissingKey(ValueError):
    """The environment variable of the key is not set; the message names it."""


class OpenAIClient:
    """Belongs to one event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key_env: str | None = None,
        max_concurrent: int = 64,
        max_retries: int = 6,
        first_wait_seconds: float = FIRST_WAIT_SECONDS,
        key_field: str = "generation.api_key_env",
    ) -> None:
        """`base_url` goes up to `/v1`; `key_field` names the variable of the key. Raises MissingKey."""
        self.base_url = base_url.rstrip("/")
        self._headers: dict[str, str] = {}
        if api_key_env:
            key = os.environ.get(api_key_env, "").strip()
            if not key:
                problem = "this environment variable is not set, or empty; it holds the key of the server"
                raise MissingKey(f"{key_field} = {api_key_env}: {problem}")
            self._headers["Authorization"] = f"Bearer {key}"
        self._max_retries, self._first_wait = max_retries, first_wait_seconds
        self._places = asyncio.Semaphore(max_concurrent)
        self._http: aiohttp.ClientSession | None = None
        self._num_retries = 0

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON that the server answers; the caller sets the deadline (`asyncio.timeout`).

        Raises RequestRefused as the server does, and EngineFailed when it does not answer after all retries.
        """
        async with self._places:
            for attempt in range(self._max_retries + 1):
                self._num_retries += attempt > 0
                try:
                    return await self._attempt(path, body)
                except _Passing as failure:
                    last = failure
                if attempt < self._max_retries:
                    await asyncio.sleep(self._wait(attempt, last.retry_after))
        attempts = f"{self._max_retries + 1} attempts; the last: {last}"
        raise EngineFailed(f"{self.base_url}{path} has not answered in {attempts}")

    async def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of one answer to a conversation, for judges. Raises like `post`."""
        body = {"model": model, "messages": list(messages), **options}
        answer = await self.post("/chat/completions", body)
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as error:
            problem = f"answered without a message: {_cut(str(answer))}"
            raise EngineFailed(f"{self.base_url}/chat/completions {problem}") from error

    def take_retries(self) -> int:
        retries, self._num_retries = self._num_retries, 0
        return retries

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _attempt(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        url = f"{self.base_url}{path}"
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        try:
            async with self._http.post(url, json=dict(body)) as response:
                if response.status == 200:
                    answer = await response.json()
                    if not isinstance(answer, dict):
                        raise RequestRefused(f"{url} answered what is no JSON object")
                    return answer
                text = await response.text()
                with suppress(ValueError, KeyError, TypeError):  # OpenAI's shape, or any other
                    text = str(json.loads(text)["error"]["message"])
                problem = f"status {response.status}: {_cut(text)}"
                if response.status in _PASSING:
                    raise _Passing(problem, response.headers.get("Retry-After", ""))
                raise RequestRefused(f"{url} answered {problem}")
        except RequestRefused:
            raise
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error

    def _wait(self, attempt: int, retry_after: str) -> float:
        """Seconds before the next attempt: as the server says, else longer each time, and not in step."""
        with suppress(ValueError):  # absent, or a date
            return min(max(0.0, float(retry_after)), MAX_WAIT_SECONDS)
        return min(self._first_wait * 2.0**attempt, MAX_WAIT_SECONDS) * random.uniform(0.5, 1.0)


class _Passing(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, message: str, retry_after: str = "") -> None:
        super().__init__(message)
        self.retry_after = retry_after


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"
