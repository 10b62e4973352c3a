"""Rewards that a server computes: a language model as a judge, and a reward model behind a URL."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from nemorl.config.environment import (
    JudgeRewardConfig,
    ModelRewardConfig,
    ServiceRewardBase,
    StepRewardConfig,
)
from nemorl.generation.openai_client import MissingKey, OpenAIClient
from nemorl.generation.types import EngineFailed

from .find import RewardError
from .scored import Answers, Attempts, Failed, Outcome, Score, Scorer, Service, as_dicts, text_of
from .steps import StepScore, step_rewards

C = TypeVar("C", bound=ServiceRewardBase)


class ServiceScorer(Scorer, Generic[C]):
    service: Service

    def __init__(self, config: C, seconds: float, outage_seconds: float) -> None:
        super().__init__(config, seconds)
        self._config = config
        self.service = Service(f"{self.label} at {config.url}", outage_seconds)
        given = config.model_dump(include={"api_key_env", "max_concurrent", "max_retries"})
        try:
            self._client = OpenAIClient(config.url, key_field=f"rewards ({self.name}): api_key_env", **given)
        except MissingKey as error:
            raise RewardError(str(error)) from error

    async def close(self) -> None:
        await self._client.close()

    def _take_retries(self) -> int:
        """Groups that are scored at the same time share them out."""
        return self._client.take_retries() + self.service.take_retries()

    async def _call(self, part: Answers) -> Outcome[Any]:
        attempts = Attempts(self.service)
        with self.service.calling():
            while True:
                outcome = await super()._call(part)
                if not isinstance(outcome.error, EngineFailed | TimeoutError):
                    self.service.answered()
                    return outcome
                if not await attempts.repeat(str(outcome.failure)):
                    return outcome


class JudgeReward(ServiceScorer[JudgeRewardConfig]):
    """Asks a language model for scores of single answers or of a group (as OpenPipe's RULER), made 0 to 1."""

    def _part_size(self, answers: Answers) -> int:
        return len(answers) if self._config.ranks_groups else 1

    async def _ask(self, part: Answers) -> dict[str, Any]:
        config, texts = self._config, [text_of(c.exchange) for c in part.conversations]
        given = {"prompt": text_of(part.conversations[0].opening), "answer": part.task.answer or ""}
        if config.ranks_groups:
            given["completions"] = "\n\n".join(f"Answer {n}:\n{text}" for n, text in enumerate(texts, 1))
        else:
            given["completion"] = texts[0]
        messages = [{"role": "user", "content": filled(config.prompt, given)}]
        if config.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        body = {"model": config.model, "messages": messages, "temperature": config.temperature}
        return await self._client.post("/chat/completions", {**body, "max_tokens": config.max_tokens})

    def _read(self, value: dict[str, Any], count: int) -> list[Score]:
        try:
            text = str(value["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            return [Failed(f"{self.label}: the server answered without a message")] * count
        scores = self._parsed(text, count)
        if scores is None:
            expected = "a score" if not self._config.ranks_groups else f"{count} scores"
            end = repr(text if len(text) <= 200 else f"…{text[-199:]}")
            return [Failed(f"{self.label}: the judge said {end}, without {expected}")] * count
        return [self._worth(score) for score in scores]

    def _parsed(self, text: str, count: int) -> list[Any] | None:
        ranks = self._config.ranks_groups
        if self._config.parser == "regex":
            matches = [match[1] for match in re.finditer(self._config.pattern, text)]
            scores = matches if ranks else matches[-1:]
            return scores if len(scores) == count else None
        key = "scores" if ranks else "score"
        for item in reversed(list(_objects(text))):
            if key in item:
                scores = item[key] if ranks else [item[key]]
                return scores if isinstance(scores, list) and len(scores) == count else None
        return None

    def _worth(self, score: Any) -> Score:
        low, high = self._config.min_score, self._config.max_score
        with suppress(TypeError, ValueError):
            if not isinstance(score, bool) and low <= float(score) <= high:
                return (float(score) - low) / (high - low)
        problem = f"the judge's score is {score!r}: expected a number from {low:g} to {high:g}"
        return Failed(f"{self.label}: {problem}")


class ModelServiceReward(ServiceScorer[ModelRewardConfig]):
    """Sends conversations to `nemorl serve reward` or vLLM's `/classify`, and takes one number each."""

    def _part_size(self, answers: Answers) -> int:
        return 1 if self._config.protocol == "vllm" and answers.chat else self._config.batch_size

    async def _ask(self, part: Answers) -> dict[str, Any]:
        model, conversations = {"model": self._config.model}, part.conversations
        if self._config.protocol == "nemorl":
            parts = [(as_dicts(c.opening), as_dicts(c.exchange)) for c in conversations]
            content = [{"prompt": prompt, "completion": completion} for prompt, completion in parts]
            steps = self._config.steps
            asked = {} if steps is None else {"steps": {"separator": steps.separator}}
            return await self._client.post("/rewards", {**model, **asked, "conversations": content})
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
        if (steps := self._config.steps) is not None:
            return self._of_steps(item, steps)
        score = item.get("probs" if self._config.protocol == "vllm" else "reward")
        if self._config.protocol == "vllm" and isinstance(score, list) and len(score) == 1:
            score = score[0]
        if isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score):
            return float(score)
        return Failed(f"{self.label}: the server's score is {shortened(score)}: expected a finite number")

    def _of_steps(self, item: dict[str, Any], steps: StepRewardConfig) -> Score:
        try:
            scores = [StepScore(s["turn"], s["end"], float(s["reward"])) for s in item["steps"]]
            return step_rewards(scores, steps.reduce)
        except (KeyError, TypeError, ValueError):
            expected = "expected a list `steps` with a score for each"
            return Failed(f"{self.label}: the server answered {shortened(item)}: {expected}")


def filled(template: str, given: dict[str, str]) -> str:
    """The template with `{name}` replaced, once and for known names only: other braces are the template's."""
    return re.sub(r"\{(\w+)\}", lambda match: given.get(match.group(1), match.group(0)), template)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            if isinstance(found, dict):
                yield found
        place = text.find("{", end)


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
