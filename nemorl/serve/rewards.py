"""The HTTP application of a reward model: POST /v1/rewards scores conversations; GET /health needs no key.

    {"model": "taste", "conversations": [{"prompt": [message, …], "completion": [message, …]}, …]}
    {"object": "list", "model": "taste", "data": [{"index": 0, "reward": 1.25, "num_tokens": 17}, …]}

One that cannot be scored has `"reward": null` and a sentence `error`; the others have their scores.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web
from pydantic import Field

from nemorl.data.examples import Encoder, Example, ExampleError
from nemorl.data.tokenizer import Prompts, Tokenizer, TokenizerError
from nemorl.trajectories import Message

from .requests import ApiError, ModelRequest, Strict, read_request

Score = Callable[[Sequence[Example]], Awaitable[list[float]]]
MAX_CONVERSATIONS = 256  # of a request
MAX_BATCH = 64  # sequences in one call of `Score`


class RewardMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class JudgedConversation(Strict):
    prompt: list[RewardMessage]  # before the answer
    # Messages of the assistant, and the replies to all but the last.
    completion: list[RewardMessage] = Field(min_length=1)


class RewardRequest(ModelRequest):
    conversations: list[JudgedConversation] = Field(min_length=1, max_length=MAX_CONVERSATIONS)


class Batcher:
    """Scores the requests that wait at the same time together."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._waiting: asyncio.Queue[tuple[Example, asyncio.Future[float]]] = asyncio.Queue()

    def ask(self, example: Example) -> asyncio.Future[float]:
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((example, answer))
        return answer

    async def run(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < MAX_BATCH and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [(example, answer) for example, answer in batch if not answer.done()]  # not cancelled
            if not batch:
                continue
            try:
                scores = await self._score([example for example, _ in batch])
            except Exception as error:  # noqa: BLE001 - raised where each of them is awaited
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), score in zip(batch, scores, strict=True):
                if not answer.done():
                    answer.set_result(score)


@dataclass(frozen=True)
class ServedRewards:
    """A reward model, and how conversations become its tokens: as they did when it was trained."""

    name: str
    score: Score
    tokenizer: Tokenizer
    prompts: Prompts
    max_length: int
    timeout: float  # seconds for an answer

    def add_routes(self, app: web.Application) -> None:
        batcher = Batcher(self.score)

        async def running(_: web.Application) -> AsyncIterator[None]:
            task = asyncio.create_task(batcher.run())
            yield
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        async def rewards(request: web.Request) -> web.Response:
            body = read_request(RewardRequest, await request.read(), self.name)
            return web.json_response(await self._answer(batcher, body.conversations))

        async def health(_: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        app.cleanup_ctx.append(running)
        app.add_routes([web.get("/health", health), web.post("/v1/rewards", rewards)])

    async def _answer(self, batcher: Batcher, conversations: Sequence[JudgedConversation]) -> dict[str, Any]:
        async def item(index: int, example: Example | ExampleError | TokenizerError) -> dict[str, Any]:
            if not isinstance(example, Example):
                return {"index": index, "reward": None, "error": str(example)}
            reward = await batcher.ask(example)
            if not math.isfinite(reward):
                return {"index": index, "reward": None, "error": f"the model's score is {reward}"}
            return {"index": index, "reward": reward, "num_tokens": example.num_tokens}

        examples = await asyncio.to_thread(lambda: [self._example(one) for one in conversations])
        try:
            async with asyncio.timeout(self.timeout):
                items = await asyncio.gather(*(item(*one) for one in enumerate(examples)))
        except TimeoutError as error:
            raise ApiError(504, f"No scores within {self.timeout:g} s.", kind="server_error") from error
        return {"object": "list", "model": self.name, "data": items}

    def _example(self, conversation: JudgedConversation) -> Example | ExampleError | TokenizerError:
        opening = [Message(m.role, m.content) for m in conversation.prompt]
        exchange = [Message(m.role, m.content) for m in conversation.completion]
        try:
            return Encoder(self.tokenizer, self.prompts, self.max_length).dialogue(opening, exchange)
        except (ExampleError, TokenizerError) as error:
            return error
