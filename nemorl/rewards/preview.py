"""Rewards of answers that exist: samples of an earlier run, lines of a file, or typed text, scored by part.

Nothing is sampled, and no model of the run is started: rewards that need one are left out with the reason.
"""

import asyncio
import json
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemorl.config.base import counted
from nemorl.config.environment import FunctionRewardConfig, LocalModelRewardConfig, RewardConfig
from nemorl.trajectories import Message, Task

from .compose import FunctionReward, scorer_of, scripted
from .find import RewardError
from .scored import Answers, Failed, Outcome, Scorer
from .steps import StepRewards

MAX_ANSWERS = 512
SAMPLES = "samples.jsonl"  # of a run folder
_MAX_LINE_ERRORS = 5
_MAX_SHOWN = 60  # characters of a line in a sentence
_EXAMPLE = '{"prompt": "2+2=", "completion": "4"}, an object a line'
_BINS = 20
_TOKEN_COLUMNS = frozenset({"completion_ids", "sampled_ids"})
# Of a line of samples.jsonl, what is no column of the task.
_OF_SAMPLE = frozenset(
    {
        *("step", "phase", "task", "group", "prompt", "completion", "completions", "answer", "reward"),
        *("rewards", "stop", "prompt_tokens", "sampled_tokens", "seconds_environment", "error"),
    }
)


@dataclass(frozen=True)
class Answer:
    """One answer; those of a `group` are answers to the same task."""

    prompt: str
    completion: str
    answer: str | None = None  # the expected one
    group: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)  # further ones of the task
    recorded: Mapping[str, float] = field(default_factory=dict)  # rewards of the run that sampled it
    is_part: bool = False  # samples.jsonl has it, and not all other answers of its group


@dataclass(frozen=True)
class Part:
    """One reward of all answers."""

    name: str
    weight: float
    source: str  # computed, recorded by the run, or skipped
    values: Sequence[float | None]  # in the order of the answers; None where it does not apply or failed
    errors: Sequence[str | None] = ()
    seconds: float = 0.0  # of all calls
    note: str = ""
    traceback: str = ""  # of the first call that raised


@dataclass(frozen=True)
class Preview:
    answers: Sequence[Answer]
    parts: Sequence[Part]
    totals: Sequence[float | None]  # weighted sums; None where a part failed
    seconds: float

    @property
    def equal_groups(self) -> tuple[int, int]:
        """Groups of several answers whose sums are all equal, which train nothing, and all such groups."""
        groups: dict[str, list[float]] = {}
        for answer, total in zip(self.answers, self.totals, strict=True):
            if total is not None:
                groups.setdefault(answer.group, []).append(total)
        several = [totals for totals in groups.values() if len(totals) > 1]
        return sum(max(totals) - min(totals) < 1e-12 for totals in several), len(several)

    @property
    def is_partial(self) -> bool:
        """True if groups lack answers, so that more of them may have a spread of rewards."""
        return any(answer.is_part for answer in self.answers)

    def as_json(self) -> dict[str, Any]:
        equal, groups = self.equal_groups
        return {
            "answers": [
                {"prompt": a.prompt, "completion": a.completion, "answer": a.answer, "group": a.group}
                for a in self.answers
            ],
            "parts": [{**vars(part), **_summary(part.values)} for part in self.parts],
            "totals": list(self.totals),
            "total": _summary(self.totals),
            "groups": groups,
            "equal_groups": equal,
            "is_partial": self.is_partial,
            "seconds": self.seconds,
        }


def end_token(model: Path) -> str:
    """The text of the token with which a model's tokenizer ends an answer; empty if it is not known."""
    try:
        token = json.loads((model / "tokenizer_config.json").read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ""
    return str((token.get("content") if isinstance(token, dict) else token) or "")


def read_answers(text: str, limit: int = MAX_ANSWERS, end: str = "") -> tuple[list[Answer], list[str]]:
    """The newest answers of the lines of a file, and sentences about lines that have none.

    A line is an object with `prompt`, and `completion` or the list `completions` of a group; it may have
    `answer`, `group` and columns that rewards take. Lines of samples.jsonl are that, too: `end` is the text
    of the end token, which they have and rewards are not given.
    """
    answers: list[Answer] = []
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            answers += _of_line(_parsed(line), number)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if len(problems) > _MAX_LINE_ERRORS:
        more = counted(len(problems) - _MAX_LINE_ERRORS, "further line")
        problems = [*problems[:_MAX_LINE_ERRORS], f"and {more} without answers"]
    if end:
        answers = [replace(one, completion=one.completion.removesuffix(end)) for one in answers]
    return answers[-limit:], problems


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        place = f" (at column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{_shortened(line)} is not JSON{place}; write {_EXAMPLE}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{_shortened(line)} is no object; write {_EXAMPLE}")
    return found


def _shortened(line: str) -> str:
    text = line.strip()
    return f"`{text}`" if len(text) <= _MAX_SHOWN else f"`{text[: _MAX_SHOWN - 1]}…`"


def _of_line(line: dict[str, Any], number: int) -> list[Answer]:
    texts = line.get("completions", [line.get("completion")])
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        name = "completions" if "completions" in line else "completion"
        value = f"is {_shortened(json.dumps(line[name]))}" if name in line else "is missing"
        raise ValueError(
            f"`{name}` {value}; write a text as `completion`, or a list of them as `completions`"
        )
    rewards = line.get("rewards") or {}
    if not isinstance(rewards, dict) or not all(isinstance(value, int | float) for value in rewards.values()):
        value = _shortened(json.dumps(rewards))
        raise ValueError(f"`rewards` is {value}; write an object of numbers by name, or leave it out")
    answer = line.get("answer")
    is_part = "task" in line and "completions" not in line
    of_line = f"line {number}"
    if "task" in line:  # tasks of a validation have numbers of their own
        of_line = f"{line.get('phase', '')} {line.get('step')}/{line['task']}"
    group = line.get("group", of_line)
    columns = {key: value for key, value in line.items() if key not in _OF_SAMPLE}
    recorded = {name: float(value) for name, value in rewards.items()}
    expected = None if answer is None else str(answer)
    of_all = Answer(str(line.get("prompt", "")), "", expected, str(group), columns, recorded, is_part)
    return [replace(of_all, completion=text) for text in texts]


class _Traced(FunctionReward):
    """Keeps the traceback of the first call that raised."""

    traceback = ""

    async def _call(self, part: Answers) -> Outcome[Any]:
        outcome = await super()._call(part)
        if outcome.error is not None and not self.traceback:
            if isinstance(outcome.error, TimeoutError):
                self.traceback = f"{outcome.failure}\n"
            else:
                self.traceback = "".join(traceback.format_exception(outcome.error))
        return outcome


def preview(
    rewards: Sequence[RewardConfig],
    environment_weights: Mapping[str, float],
    answers: Sequence[Answer],
    *,
    chat: bool,
    seconds: float,
) -> Preview:
    """Score the answers by each reward. Rewards of the environment are those that the run recorded.

    `seconds` bounds a call where the reward has no deadline. What fails is in the parts.
    """
    started = time.monotonic()
    parts = [_recorded(name, weight, answers) for name, weight in environment_weights.items()]
    parts += [_computed(config, answers, chat=chat, seconds=seconds) for config in rewards]
    totals: list[float | None] = []
    for row in range(len(answers)):
        failed = any(part.errors and part.errors[row] is not None for part in parts)
        sums = sum(part.weight * value for part in parts if (value := part.values[row]) is not None)
        totals.append(None if failed else float(sums))
    return Preview(answers, parts, totals, time.monotonic() - started)


def _recorded(name: str, weight: float, answers: Sequence[Answer]) -> Part:
    values = [answer.recorded.get(name) for answer in answers]
    if all(value is None for value in values):
        return _skipped(name, weight, answers, "of the environment: only samples of a run have it")
    return Part(name, weight, "recorded", values, note="of the environment, as the run recorded it")


def _skipped(name: str, weight: float, answers: Sequence[Answer], note: str) -> Part:
    return Part(name, weight, "skipped", [None] * len(answers), note=note)


def _computed(config: RewardConfig, answers: Sequence[Answer], *, chat: bool, seconds: float) -> Part:
    name, weight, count = config.metric, config.weight, len(answers)
    if isinstance(config, LocalModelRewardConfig):
        return _skipped(name, weight, answers, "a reward model that only a run starts; `nemorl serve reward`")
    if getattr(config, "steps", None) is not None:
        return _skipped(name, weight, answers, "its steps need the tokens of a run")
    note, trace = "", ""
    try:
        if isinstance(config, FunctionRewardConfig):
            scorer: Scorer = _Traced(config, seconds)
            assert isinstance(scorer, FunctionReward)
            if scorer.columns & _TOKEN_COLUMNS:
                note = "computed on characters: texts have no tokens"
        else:
            scorer = scorer_of(config, seconds, 0.0)
        scored = asyncio.run(_scores(scorer, answers, chat))
        trace = getattr(scorer, "traceback", "")
    except RewardError as error:
        cause = error.__cause__
        trace = "".join(traceback.format_exception(cause)) if cause is not None else ""
        return Part(name, weight, "computed", [None] * count, [str(error)] * count, traceback=trace)
    values: list[float | None] = []
    errors: list[str | None] = []
    for score in scored[0]:
        errors.append(score.reason if isinstance(score, Failed) else None)
        values.append(None if score is None or isinstance(score, Failed | StepRewards) else float(score))
    return Part(name, weight, "computed", values, errors, scored[1], note, trace)


async def _scores(scorer: Scorer, answers: Sequence[Answer], chat: bool) -> tuple[list[Any], float]:
    """A score for each answer, group by group, and the seconds of all calls."""
    groups: dict[str, list[int]] = {}
    for place, answer in enumerate(answers):
        groups.setdefault(answer.group, []).append(place)
    scores: list[Any] = [None] * len(answers)
    seconds = 0.0
    try:
        for number, places in enumerate(groups.values()):
            first = answers[places[0]]
            messages = (Message("user", first.prompt),)
            task = Task(number, messages, first.answer, dict(first.columns))
            said = [(Message("assistant", answers[place].completion),) for place in places]
            conversations = [scripted(task, messages, exchange) for exchange in said]
            scored = await scorer.score(Answers(task, conversations, chat))
            seconds += scored.seconds
            for place, score in zip(places, scored.scores, strict=True):
                scores[place] = score
    finally:
        await scorer.close()
    return scores, seconds


def _summary(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean, spread and histogram of the values that there are."""
    found = np.array([value for value in values if value is not None], dtype=np.float64)
    if not found.size:
        return {"count": 0, "mean": None, "std": None, "min": None, "max": None, "bins": []}
    counts, edges = np.histogram(found, bins=_BINS)
    bins = [
        {"low": float(low), "high": float(high), "count": int(count)}
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    summary = {"mean": found.mean(), "std": found.std(), "min": found.min(), "max": found.max()}
    return {"count": int(found.size), **{k: float(v) for k, v in summary.items()}, "bins": bins}
