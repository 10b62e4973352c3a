"""The HTTP application of a reward model.

GET  /health      whether it answers; asks for no key
POST /v1/rewards  a score for each of some conversations

    {"model": "taste", "conversations": [{"prompt": [message, …], "completion": [message, …]}, …]}
    {"object": "list", "model": "taste", "data": [{"index": 0, "reward": 1.25, "num_tokens": 17}, …]}

One that cannot be scored has `"reward": null` and a sentence `error`; the others have their scores.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

from aiohttp import web
from pydantic import Field

from nemorl.data.examples import Example, ExampleError, dialogue_example
from nemorl.data.tokenizer import Prompts, Tokenizer, TokenizerError
from nemorl.trajectories import Message

from .app import at_a_time, errors_as_json, require_key
from .requests import ApiError, Strict, read_request

log = logging.getLogger(__name__)

Refusal = ExampleError | TokenizerError
Score = Callable[[Sequence[Example]], Awaitable[list[float]]]
MAX_CONVERSATIONS = 256  # of a request


class RewardMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class JudgedConversation(Strict):
    prompt: list[RewardMessage]
    """The messages before the answer."""
    completion: list[RewardMessage] = Field(min_length=1)
    """The answer: messages of the assistant, and what was answered to all but the last."""


class RewardRequest(Strict):
    """POST /v1/rewards."""

    model: str
    conversations: list[JudgedConversation] = Field(min_length=1, max_length=MAX_CONVERSATIONS)


@dataclass(frozen=True)
class ServedRewards:
    """A reward model and how conversations become its tokens: as they did when it was trained."""

    name: str
    score: Score
    tokenizer: Tokenizer
    prompts: Prompts
    max_length: int
    timeout: float  # seconds for an answer
    most_together: int = 64  # sequences in one call of `score`

    def example(self, conversation: JudgedConversation) -> Example:
        """Raises ExampleError and TokenizerError."""
        opening, exchange = (
            [Message(m.role, m.content) for m in messages]
            for messages in (conversation.prompt, conversation.completion)
        )
        return dialogue_example(opening, exchange, self.tokenizer, self.prompts, self.max_length)


class Batcher:
    """Scores together what several requests ask for at the same time."""

    def __init__(self, score: Score, most: int) -> None:
        self._score = score
        self._most = most
        self._waiting: asyncio.Queue[tuple[Example, asyncio.Future[float]]] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def ask(self, example: Example) -> asyncio.Future[float]:
        """The score, when it is there."""
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((example, answer))
        return answer

    async def _run(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._most and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [(example, answer) for example, answer in batch if not answer.done()]  # who has gone away
            if batch:
                await self._answer(batch)

    async def _answer(self, batch: Sequence[tuple[Example, "asyncio.Future[float]"]]) -> None:
        try:
            scores = await self._score([example for example, _ in batch])
        except Exception as error:  # noqa: BLE001 - raised where each of them is waited for
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), score in zip(batch, scores, strict=True):
            if not answer.done():
                answer.set_result(score)


def make_reward_app(
    served: ServedRewards, *, api_key: str, max_concurrent: int, max_body_bytes: int
) -> web.Application:
    """The application. Every path but /health requires `Authorization: Bearer <api_key>`."""
    app = web.Application(
        client_max_size=max_body_bytes,
        middlewares=[errors_as_json, require_key(api_key), at_a_time(max_concurrent)],
    )
    batcher = Batcher(served.score, served.most_together)

    async def running(_: web.Application) -> Any:
        async with batcher:
            yield

    async def rewards(request: web.Request) -> web.Response:
        return web.json_response(await _answer(served, batcher, await request.read()))

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app.cleanup_ctx.append(running)
    app.add_routes([web.get("/health", health), web.post("/v1/rewards", rewards)])
    return app


async def _answer(served: ServedRewards, batcher: Batcher, body: bytes) -> dict[str, Any]:
    asked = read_request(RewardRequest, body)
    if asked.model != served.name:
        known = f"The model `{asked.model}` is not served; `{served.name}` is."
        raise ApiError(404, known, param="model", code="model_not_found")
    found = await asyncio.to_thread(_examples, served, asked.conversations)
    pending = [batcher.ask(example) if isinstance(example, Example) else None for example in found]
    try:
        async with asyncio.timeout(served.timeout):
            await asyncio.gather(*(answer for answer in pending if answer is not None))
    except TimeoutError as error:
        for answer in pending:
            if answer is not None:
                answer.cancel()
        raise ApiError(504, f"No scores within {served.timeout:g} s.", kind="server_error") from error
    items = (
        _item(index, example, answer)
        for index, (example, answer) in enumerate(zip(found, pending, strict=True))
    )
    return {"object": "list", "model": served.name, "data": list(items)}


def _examples(served: ServedRewards, conversations: Sequence[JudgedConversation]) -> list[Example | Refusal]:
    found: list[Example | Refusal] = []
    for conversation in conversations:
        try:
            found.append(served.example(conversation))
        except (ExampleError, TokenizerError) as error:
            found.append(error)
    return found


def _item(index: int, example: Example | Refusal, answer: "asyncio.Future[float] | None") -> dict[str, Any]:
    if answer is None or not isinstance(example, Example):
        return {"index": index, "reward": None, "error": str(example)}
    reward = answer.result()
    if not math.isfinite(reward):
        return {"index": index, "reward": None, "error": f"the model's score is {reward}"}
    return {"index": index, "reward": reward, "num_tokens": example.num_tokens}
