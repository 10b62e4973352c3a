"""The HTTP application of a reward model: POST /v1/rewards scores conversations; GET /health needs no key.

    {"model": "taste", "conversations": [{"prompt": [message, …], "completion": [message, …]}, …]}
    {"object": "list", "model": "taste", "data": [{"index": 0, "reward": 1.25, "num_tokens": 17}, …]}

With `"steps": {"separator": "…"}` the model is a process reward model. An item then has
`"steps": [{"turn": 0, "end": 12, "reward": 1.25}, …]`: the number of the assistant's message, its characters
up to the end of the step (null: all), and the score there. `reward` is that of the last step.

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

from nemorl.data.examples import Encoder, Example, ExampleError, StepEnd
from nemorl.data.messages import read_message
from nemorl.data.rows import DatasetError
from nemorl.data.tokenizer import Prompts, Tokenizer, TokenizerError
from nemorl.errors import NemorlError
from nemorl.trajectories import Message

from .requests import ApiError, ModelRequest, Strict, read_request

# Of each example the values at the tokens of its loss mask.
Score = Callable[[Sequence[Example]], Awaitable[list[list[float]]]]
MAX_CONVERSATIONS = 256  # of a request
MAX_BATCH = 64  # sequences in one call of `Score`


class RewardMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None  # null with calls
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def as_message(self) -> Message:
        """Raises DatasetError."""
        return read_message(self.model_dump())


class JudgedConversation(Strict):
    prompt: list[RewardMessage]  # before the answer
    # Messages of the assistant, and the replies to all but the last.
    completion: list[RewardMessage] = Field(min_length=1)


class StepsRequest(Strict):
    separator: str  # that ends a step; empty: each token is one


class RewardRequest(ModelRequest):
    steps: StepsRequest | None = None
    conversations: list[JudgedConversation] = Field(min_length=1, max_length=MAX_CONVERSATIONS)


class Batcher:
    """Scores the requests that wait at the same time together."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._waiting: asyncio.Queue[tuple[Example, asyncio.Future[list[float]]]] = asyncio.Queue()

    def ask(self, example: Example) -> asyncio.Future[list[float]]:
        answer: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
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
class Encoded:
    example: Example  # marked where it is scored
    ends: Sequence[StepEnd] | None = None  # of its steps


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
            return web.json_response(await self._answer(batcher, body))

        async def health(_: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        app.cleanup_ctx.append(running)
        app.add_routes([web.get("/health", health), web.post("/v1/rewards", rewards)])

    async def _answer(self, batcher: Batcher, body: RewardRequest) -> dict[str, Any]:
        async def item(index: int, encoded: Encoded | NemorlError) -> dict[str, Any]:
            if not isinstance(encoded, Encoded):
                return {"index": index, "reward": None, "error": str(encoded)}
            scores = await batcher.ask(encoded.example)
            for score in scores:
                if not math.isfinite(score):
                    return {"index": index, "reward": None, "error": f"the model's score is {score}"}
            of_all = {"index": index, "reward": scores[-1], "num_tokens": encoded.example.num_tokens}
            if encoded.ends is None:
                return of_all
            steps = zip(encoded.ends, scores, strict=True)
            return of_all | {"steps": [{"turn": s.turn, "end": s.end, "reward": r} for s, r in steps]}

        examples = await asyncio.to_thread(
            lambda: [self._encoded(one, body.steps) for one in body.conversations]
        )
        try:
            async with asyncio.timeout(self.timeout):
                items = await asyncio.gather(*(item(*one) for one in enumerate(examples)))
        except TimeoutError as error:
            raise ApiError(504, f"No scores within {self.timeout:g} s.", kind="server_error") from error
        return {"object": "list", "model": self.name, "data": items}

    def _encoded(self, conversation: JudgedConversation, steps: StepsRequest | None) -> Encoded | NemorlError:
        try:
            opening = [one.as_message() for one in conversation.prompt]
            exchange = [one.as_message() for one in conversation.completion]
            encoder = Encoder(self.tokenizer, self.prompts, self.max_length)
            if steps is None:
                return Encoded(encoder.dialogue(opening, exchange).marked_at_end)
            example, ends = encoder.exchange_in_steps(opening, exchange, steps.separator)
            return Encoded(example, ends)
        except (DatasetError, ExampleError, TokenizerError) as error:
            return error
