"""A language model as a judge: it reads answers, alone or all of a group, and gives them scores.

A judge that sees the whole group has to compare only what is there, which is easier than an absolute score
and spends one request on a group (as in OpenPipe's RULER).
"""

import asyncio
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from nemorl.config.environment import JudgeRewardConfig
from nemorl.trajectories import Conversation, Task

from .scored import Answers, Call, Failed, Score, Scored, Service, text_of


class JudgeReward:
    """Asks for scores between `min_score` and `max_score`, which become rewards from 0 to 1."""

    def __init__(self, config: JudgeRewardConfig, seconds: float) -> None:
        """Raises RewardError."""
        self.name = config.metric
        self._config = config
        self._service = Service(config, seconds)

    async def score(self, answers: Answers) -> Scored:
        """One request for each answer, or one for the group; what fails costs the answers it is about."""
        said = answers.conversations
        parts: list[Sequence[Conversation]] = [said] if self._config.ranks_groups else [[c] for c in said]
        calls = await asyncio.gather(*(self._ask(answers.task, part) for part in parts))
        return Scored(
            [score for call, part in zip(calls, parts, strict=True) for score in self._read(call, len(part))],
            sum(call.seconds for call in calls),
            sum(call.waited for call in calls),
            self._service.take_retries(),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()

    async def _ask(self, task: Task, part: Sequence[Conversation]) -> Call[dict[str, Any]]:
        config = self._config
        given = {"prompt": text_of(part[0].opening), "answer": task.answer or ""}
        if config.ranks_groups:
            numbered = (f"Answer {n}:\n{text_of(c.exchange)}" for n, c in enumerate(part, 1))
            given["completions"] = "\n\n".join(numbered)
        else:
            given["completion"] = text_of(part[0].exchange)
        messages = [{"role": "user", "content": filled(config.prompt, given)}]
        if config.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        return await self._service.post(
            "/chat/completions",
            {
                "model": config.model,
                "messages": messages,
                "temperature": config.temperature,
                "max_tokens": config.max_tokens,
            },
        )

    def _read(self, call: Call[dict[str, Any]], count: int) -> list[Score]:
        if call.outcome.value is None:
            return [Failed(str(call.outcome.failure))] * count
        try:
            text = str(call.outcome.value["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            return [Failed(f"reward `{self.name}`: the server answered without a message")] * count
        scores = self._parsed(text, count)
        if scores is None:
            expected = "a score" if not self._config.ranks_groups else f"{count} scores"
            return [Failed(f"reward `{self.name}`: the judge said {_end(text)}, without {expected}")] * count
        return [self._worth(score) for score in scores]

    def _parsed(self, text: str, count: int) -> list[Any] | None:
        """The scores, or None where there are not as many as answers."""
        if self._config.parser == "regex":
            found = [match.group(1) for match in re.finditer(self._config.pattern, text)]
            if self._config.ranks_groups:
                return found if len(found) == count else None
            return found[-1:] or None
        key = "scores" if self._config.ranks_groups else "score"
        for found in reversed(list(_objects(text))):
            if key in found:
                scores = found[key] if self._config.ranks_groups else [found[key]]
                return scores if isinstance(scores, list) and len(scores) == count else None
        return None

    def _worth(self, score: Any) -> Score:
        low, high = self._config.min_score, self._config.max_score
        try:
            value = math.nan if isinstance(score, bool) else float(score)
        except (TypeError, ValueError):
            value = math.nan
        if low <= value <= high:
            return (value - low) / (high - low)
        expected = f"expected a number from {low:g} to {high:g}"
        return Failed(f"reward `{self.name}`: the judge's score is {score!r}: {expected}")


def filled(template: str, given: dict[str, str]) -> str:
    """The template with `{name}` replaced, once and for known names only: other braces are the template's."""
    return re.sub(r"\{(\w+)\}", lambda match: given.get(match.group(1), match.group(0)), template)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects that stand in a text, none of them inside another."""
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


def _end(text: str) -> str:
    """What a text says last, for a message."""
    return repr(text if len(text) <= 200 else f"…{text[-199:]}")
