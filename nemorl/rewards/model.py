"""A reward model behind a URL: `nemorl serve reward`, or vLLM's `/classify`."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from nemorl.config.environment import ModelRewardConfig
from nemorl.trajectories import Conversation

from .scored import Answers, Call, Failed, Score, Scored, Service, as_dicts


class ModelServiceReward:
    """Sends conversations, several to a request, and takes one number each."""

    def __init__(self, config: ModelRewardConfig, seconds: float) -> None:
        """Raises RewardError."""
        self.name = config.metric
        self._config = config
        self._service = Service(config, seconds)

    async def score(self, answers: Answers) -> Scored:
        """A request that fails costs the answers in it."""
        one_by_one = self._config.protocol == "vllm" and answers.chat
        size = 1 if one_by_one else self._config.batch_size
        batches = [answers.conversations[start : start + size] for start in range(0, len(answers), size)]
        calls = await asyncio.gather(*(self._ask(batch, answers.chat) for batch in batches))
        return Scored(
            [
                score
                for call, batch in zip(calls, batches, strict=True)
                for score in self._read(call, len(batch))
            ],
            sum(call.seconds for call in calls),
            sum(call.waited for call in calls),
            self._service.take_retries(),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()

    async def _ask(self, batch: Sequence[Conversation], chat: bool) -> Call[dict[str, Any]]:
        model = {"model": self._config.model}
        if self._config.protocol == "nemorl":
            conversations = [
                {"prompt": as_dicts(c.opening), "completion": as_dicts(c.exchange)} for c in batch
            ]
            return await self._service.post("/rewards", {**model, "conversations": conversations})
        whole = [(*c.opening, *c.exchange) for c in batch]
        asked: dict[str, Any] = {"input": ["".join(m.content for m in messages) for messages in whole]}
        if chat:
            asked = {"messages": as_dicts(whole[0]), "add_generation_prompt": False}
        return await self._service.post("/classify", {**model, **asked, "use_activation": False})

    def _read(self, call: Call[dict[str, Any]], count: int) -> list[Score]:
        answer = call.outcome.value
        if answer is None:
            return [Failed(str(call.outcome.failure))] * count
        items = answer.get("data")
        if not isinstance(items, list) or len(items) != count or not all(isinstance(i, dict) for i in items):
            answered = f"reward `{self.name}`: the server answered {_cut(answer)} to {count} conversations"
            return [Failed(f"{answered}: expected a list `data` with one item each")] * count
        return [self._one(item) for item in items]

    def _one(self, item: dict[str, Any]) -> Score:
        if item.get("error") is not None:
            return Failed(f"reward `{self.name}`: {item['error']}")
        if self._config.protocol == "nemorl":
            score = item.get("reward")
        else:
            scores = item.get("probs")
            score = scores[0] if isinstance(scores, list) and len(scores) == 1 else scores
        if isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score):
            return float(score)
        return Failed(f"reward `{self.name}`: the server's score is {_cut(score)}: expected a finite number")


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
