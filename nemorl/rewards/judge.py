"""A language model as a judge: it reads answers, alone or all of a group, and gives them scores.

A judge that sees the whole group has to compare only what is there, which is easier than an absolute score
and spends one request on a group (as in OpenPipe's RULER).
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from nemorl.config.environment import JudgeRewardConfig

from .scored import Answers, Failed, Score, ServiceScorer, text_of


class JudgeReward(ServiceScorer):
    """Asks for scores between `min_score` and `max_score`, which become rewards from 0 to 1."""

    def __init__(self, config: JudgeRewardConfig, seconds: float) -> None:
        super().__init__(config, seconds)
        self._config = config

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
        sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        return await self._client.post(
            "/chat/completions", {"model": config.model, "messages": messages, **sampling}
        )

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
        expected = f"expected a number from {low:g} to {high:g}"
        return Failed(f"{self.label}: the judge's score is {score!r}: {expected}")


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
