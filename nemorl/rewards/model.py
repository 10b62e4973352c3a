"""A reward model behind a URL: `nemorl serve reward`, or vLLM's `/classify`."""

import math
from typing import Any

from nemorl.config.environment import ModelRewardConfig

from .scored import Answers, Failed, Score, ServiceScorer, as_dicts, shortened


class ModelServiceReward(ServiceScorer):
    """Sends conversations, several to a request, and takes one number each."""

    def __init__(self, config: ModelRewardConfig, seconds: float) -> None:
        super().__init__(config, seconds)
        self._config = config

    def _part_size(self, answers: Answers) -> int:
        return 1 if self._config.protocol == "vllm" and answers.chat else self._config.batch_size

    async def _ask(self, part: Answers) -> dict[str, Any]:
        model, conversations = {"model": self._config.model}, part.conversations
        if self._config.protocol == "nemorl":
            content = [
                {"prompt": as_dicts(c.opening), "completion": as_dicts(c.exchange)} for c in conversations
            ]
            return await self._client.post("/rewards", {**model, "conversations": content})
        whole = [(*c.opening, *c.exchange) for c in conversations]
        given: dict[str, Any] = {"input": ["".join(m.content for m in messages) for messages in whole]}
        if part.chat:
            given = {"messages": as_dicts(whole[0]), "add_generation_prompt": False}
        return await self._client.post("/classify", {**model, **given, "use_activation": False})

    def _read(self, value: dict[str, Any], count: int) -> list[Score]:
        items = value.get("data")
        if isinstance(items, list) and len(items) == count and all(isinstance(i, dict) for i in items):
            return [self._one(item) for item in items]
        answered = f"{self.label}: the server answered {shortened(value)} to {count} conversations"
        return [Failed(f"{answered}: expected a list `data` with one item each")] * count

    def _one(self, item: dict[str, Any]) -> Score:
        if item.get("error") is not None:
            return Failed(f"{self.label}: {item['error']}")
        score = item.get("probs" if self._config.protocol == "vllm" else "reward")
        if self._config.protocol == "vllm" and isinstance(score, list) and len(score) == 1:
            score = score[0]
        if isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score):
            return float(score)
        return Failed(f"{self.label}: the server's score is {shortened(score)}: expected a finite number")
