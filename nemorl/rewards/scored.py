"""Parts that all rewards share: the answers, their scores, and bounded calls of user code and of servers.

A call that a service does not answer is repeated until the outage is over, within a bound.
"""

import asyncio
import logging
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from nemorl.config.environment import RewardBase
from nemorl.trajectories import Conversation, Message, Task

from .steps import StepRewards

FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.5, 10.0  # between attempts at a call that is not answered

Columns = dict[str, list[Any]]
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failed:
    reason: str  # why there is no score; the sentence names the reward


Score = float | None | Failed | StepRewards  # None: the reward does not apply to this answer


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

    def parts(self, size: int) -> list[tuple[Sequence[int], "Answers"]]:
        """Places and answers of each call: at most `size`, of one player."""
        by_player: dict[str, list[int]] = {}
        for place, conversation in enumerate(self.conversations):
            by_player.setdefault(conversation.trajectory.player, []).append(place)
        of_calls = [
            places[start : start + size]
            for places in by_player.values()
            for start in range(0, len(places), size)
        ]
        return [
            (places, replace(self, conversations=[self.conversations[place] for place in places]))
            for places in of_calls
        ]

    @cached_property
    def columns(self) -> Columns:
        """Keyword arguments of reward functions: a list each, one entry an answer."""

        def shaped(messages: Sequence[Message]) -> str | list[dict[str, Any]]:
            return as_dicts(messages) if self.chat else "".join(m.content for m in messages)

        conversations = self.conversations
        of_task = {**self.task.columns, "answer": self.task.answer}
        of_episodes = dict.fromkeys(key for c in conversations for key in c.columns)
        players = [c.trajectory.player for c in conversations]
        return {
            **({"player": players} if any(players) else {}),
            **{key: [c.columns.get(key) for c in conversations] for key in of_episodes},
            **{key: [value] * len(self) for key, value in of_task.items()},
            "prompts": [shaped(c.opening) for c in conversations],
            "completions": [shaped(c.exchange) for c in conversations],
            "completion_ids": [c.trajectory.tokens[c.num_prompt_tokens :].tolist() for c in conversations],
            "sampled_ids": [
                [token for one in (*c.earlier, c.trajectory) for token in one.tokens[one.loss_mask].tolist()]
                for c in conversations
            ],
        }


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates and reward functions take them."""
    return [message.as_dict() for message in messages]


def text_of(messages: Sequence[Message]) -> str:
    """The contents, one message after the other, without roles."""
    return "\n".join(m.content for m in messages)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The value of a call, or a sentence saying why there is none."""

    value: T | None = None
    failure: str | None = None
    error: BaseException | None = field(default=None, compare=False)  # TimeoutError for the deadline


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
        return Outcome(failure=f"{stage}: no answer within {seconds:g} s", error=TimeoutError())
    if task.cancelled():
        return Outcome(failure=f"{stage}: cancelled itself")
    if (error := task.exception()) is not None:
        return Outcome(failure=f"{stage}: {type(error).__name__}: {error}", error=error)
    return Outcome(value=task.result())


class Service:
    """A server or other processes that calls depend on. Belongs to one event loop."""

    def __init__(self, name: str, outage_seconds: float = 0.0) -> None:
        """`outage_seconds`: how long calls are repeated while none is answered."""
        self.name, self.outage_seconds = name, outage_seconds
        self.answered_at = -math.inf  # the last time, of `time.monotonic`
        self._calls: dict[int, float] = {}  # when each that waits for an answer began
        self._outage: tuple[float, int] | None = None  # the first call without an answer, attempts since
        self._num_retries = 0

    def waits(self) -> tuple[int, float]:
        """Calls that wait, and for how many seconds none of them has been answered; from any thread."""
        began = list(self._calls.values())
        now = time.monotonic()
        return len(began), now - max(self.answered_at, min(began)) if began else 0.0

    def take_retries(self) -> int:
        retries, self._num_retries = self._num_retries, 0
        return retries

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Inside, a call waits for an answer."""
        number = max(self._calls, default=0) + 1
        self._calls[number] = time.monotonic()
        try:
            yield
        finally:
            del self._calls[number]

    def answered(self) -> None:
        self.answered_at = time.monotonic()
        if self._outage is not None:
            (since, attempts), self._outage = self._outage, None
            seconds = self.answered_at - since
            log.warning("%s answers again, after %.1f s and %d attempts", self.name, seconds, attempts)

    def not_answered(self, failure: str) -> float:
        """Note an attempt without an answer. Return when the outage began."""
        if self._outage is None:
            log.warning("%s does not answer; calls wait for it: %s", self.name, failure)
        since, attempts = self._outage or (time.monotonic(), 0)
        self._outage = since, attempts + 1
        return since

    def count_retry(self) -> None:
        self._num_retries += 1


class Attempts:
    """The attempts at one call of a service, or at work that needs several."""

    def __init__(self, service: Service) -> None:
        self._service, self._began = service, time.monotonic()
        self._failed_at = math.inf  # the attempt before
        self._wait = FIRST_WAIT_SECONDS

    async def repeat(self, failure: str) -> bool:
        """After an attempt without an answer: True, after a wait, if another one should follow.

        A call that is not answered twice while others are has failed alone: the service is up.
        """
        service, now = self._service, time.monotonic()
        if service.answered_at > self._failed_at:
            return False
        since = min(self._began, service.not_answered(failure))
        self._failed_at = now
        if now - since >= service.outage_seconds:
            return False
        # Not in step with others, but never beyond the bound.
        wait = min(self._wait * random.uniform(0.5, 1.0), since + service.outage_seconds - now)
        self._wait = min(2 * self._wait, MAX_WAIT_SECONDS)
        await asyncio.sleep(wait)
        service.count_retry()
        return True


class Scorer(ABC):
    """One reward of the `rewards` section. Belongs to one event loop."""

    def __init__(self, config: RewardBase, seconds: float) -> None:
        """`seconds` bounds a call where the config does not. Raises RewardError if it cannot be used."""
        self.name = config.metric
        self.label = f"reward `{self.name}`"  # for messages
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._seconds = config.deadline or seconds
        self.service: Service | None = None  # that its calls depend on

    async def score(self, answers: Answers) -> Scored:
        """A score for each answer; what goes wrong is in them. Raises RewardError for what none can have."""
        calls = answers.parts(self._part_size(answers))
        parts = await asyncio.gather(*(self._score_part(part) for _, part in calls))
        scores: list[Score] = [None] * len(answers)
        for (places, _), part in zip(calls, parts, strict=True):
            for place, score in zip(places, part.scores, strict=True):
                scores[place] = score
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

    async def _call(self, part: Answers) -> Outcome[Any]:
        return await attempt(self._ask(part), self.label, self._seconds)

    async def _score_part(self, part: Answers) -> Scored:
        asked, count = time.monotonic(), len(part)
        async with self._places:
            started = time.monotonic()  # from here on the deadline counts
            outcome = await self._call(part)
        seconds, failure = time.monotonic() - started, outcome.failure
        scores = self._read(outcome.value, count) if failure is None else [Failed(failure)] * count
        return Scored(scores, seconds, started - asked)
