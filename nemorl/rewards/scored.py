"""Parts that all rewards share: the answers, their scores, and bounded calls of user code and of servers."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from nemorl.config.environment import RewardBase
from nemorl.trajectories import Conversation, Message, Task

Columns = dict[str, list[Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Failed:
    reason: str  # why there is no score; the sentence names the reward


Score = float | None | Failed  # None: the reward does not apply to this answer


@dataclass(frozen=True)
class Scored:
    """The scores of some answers, one each, and the time of the calls."""

    scores: Sequence[Score]
    seconds: float = 0.0  # of all calls, without waiting for a place
    waited: float = 0.0  # seconds that calls waited for a place, added up
    retries: int | None = None  # requests that were sent again; None where there are no requests


@dataclass(frozen=True)
class ScoringMetrics:
    errors: int  # trajectories that were lost to it
    seconds: float
    waited: float
    retries: int | None


@dataclass(frozen=True)
class Answers:
    task: Task
    conversations: Sequence[Conversation]
    chat: bool  # functions get messages instead of texts

    def __len__(self) -> int:
        return len(self.conversations)

    def parts(self, size: int) -> list["Answers"]:
        starts = range(0, len(self), size)
        return [replace(self, conversations=self.conversations[start : start + size]) for start in starts]

    @cached_property
    def columns(self) -> Columns:
        """Keyword arguments of reward functions: a list each, one entry an answer."""

        def shaped(messages: Sequence[Message]) -> str | list[dict[str, str]]:
            return as_dicts(messages) if self.chat else "".join(m.content for m in messages)

        conversations = self.conversations
        of_task = {**self.task.columns, "answer": self.task.answer}
        return {
            **{key: [value] * len(self) for key, value in of_task.items()},
            "prompts": [shaped(c.opening) for c in conversations],
            "completions": [shaped(c.exchange) for c in conversations],
            "completion_ids": [c.trajectory.tokens[c.num_prompt_tokens :].tolist() for c in conversations],
            "sampled_ids": [c.trajectory.tokens[c.trajectory.loss_mask].tolist() for c in conversations],
        }


def as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as chat templates and servers take them."""
    return [{"role": m.role, "content": m.content} for m in messages]


def text_of(messages: Sequence[Message]) -> str:
    """The contents, one message after the other, without roles."""
    return "\n".join(m.content for m in messages)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The value of a call, or a sentence saying why there is none."""

    value: T | None = None
    failure: str | None = None


async def attempt(call: Coroutine[Any, Any, T], stage: str, seconds: float) -> Outcome[T]:
    """Await `call` for at most `seconds`; an exception or the deadline becomes a failure naming `stage`.

    A call that also ignores its cancellation is left behind: asyncio.wait_for would wait for it.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()  # nothing when it is done; needed when it hangs or when this wait itself is cancelled
    if not done:
        return Outcome(failure=f"{stage}: no answer within {seconds:g} s")
    if task.cancelled():
        return Outcome(failure=f"{stage}: cancelled itself")
    if (error := task.exception()) is not None:
        return Outcome(failure=f"{stage}: {type(error).__name__}: {error}")
    return Outcome(value=task.result())


class Scorer(ABC):
    """One reward of the `rewards` section. Belongs to one event loop."""

    def __init__(self, config: RewardBase, seconds: float) -> None:
        """`seconds` bounds a call where the config does not. Raises RewardError if it cannot be used."""
        self.name = config.metric
        self.label = f"reward `{self.name}`"  # for messages
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._seconds = config.deadline or seconds

    async def score(self, answers: Answers) -> Scored:
        """A score for each answer; what goes wrong is in them. Raises RewardError for what none can have."""
        parts = await asyncio.gather(*map(self._score_part, answers.parts(self._part_size(answers))))
        scores = [score for part in parts for score in part.scores]
        seconds, waited = sum(part.seconds for part in parts), sum(part.waited for part in parts)
        return Scored(scores, seconds, waited, self._take_retries())

    async def close(self) -> None:  # noqa: B027  a function holds nothing
        """Release what is held."""

    @abstractmethod
    def _part_size(self, answers: Answers) -> int:
        """Answers of one call."""

    @abstractmethod
    async def _ask(self, part: Answers) -> Any:
        """One call; what it raises fails the part, and nothing else."""

    @abstractmethod
    def _read(self, value: Any, count: int) -> list[Score]:
        """The scores of a part of `count` answers from the value of its call."""

    def _take_retries(self) -> int | None:
        return None

    async def _score_part(self, part: Answers) -> Scored:
        asked, count = time.monotonic(), len(part)
        async with self._places:
            started = time.monotonic()  # from here on the deadline counts
            outcome = await attempt(self._ask(part), self.label, self._seconds)
        seconds, failure = time.monotonic() - started, outcome.failure
        scores = self._read(outcome.value, count) if failure is None else [Failed(failure)] * count
        return Scored(scores, seconds, started - asked)
