"""A model behind an OpenAI endpoint that takes part in an environment and does not train."""

from typing import Any

import aiohttp

from nemorl.trajectories import EnvironmentLost

SHOWN_CHARACTERS = 500  # of what an endpoint says against a request
BUSY = frozenset({408, 429})  # besides 5xx: the same request may succeed later


class ChatFailed(RuntimeError):
    """The endpoint refused a request, or its answer is of no use."""


class ChatClient:
    """Shared by the conversations of a rollout worker."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None,
        temperature: float,
        max_tokens: int,
        seconds: float,
    ) -> None:
        """`url` is the address up to and with `/v1`; `seconds` limits each call."""
        self._url, self._seconds = url.rstrip("/"), seconds
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._fields = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._client: aiohttp.ClientSession | None = None  # belongs to the event loop of its first use

    async def say(self, messages: list[dict[str, Any]]) -> str:
        """What the model says next, which may be empty. Raises EnvironmentLost if nothing answers, and
        ChatFailed.
        """
        if self._client is None:
            limit = aiohttp.ClientTimeout(total=self._seconds)
            self._client = aiohttp.ClientSession(headers=self._headers, timeout=limit)
        url, body = f"{self._url}/chat/completions", {**self._fields, "messages": messages}
        try:
            async with self._client.post(url, json=body) as response:
                if response.status in BUSY or response.status >= 500:
                    raise EnvironmentLost(f"{self._url} answered with status {response.status}")
                if response.status != 200:
                    said = (await response.text())[:SHOWN_CHARACTERS]
                    raise ChatFailed(f"{self._url} refused with status {response.status}: {said}")
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise EnvironmentLost(f"{self._url} does not answer: {problem}") from error
        try:
            text = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ChatFailed(f"{self._url} answered without a text: {answer!r:.500}")
        return text

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
