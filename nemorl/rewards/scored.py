"""What a reward is shown, and what it says of it.

Bounded calls of user code and of servers: a limited number at a time, each with a deadline.

A failure is a value that names the stage.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from nemorl.config.environment import ServiceRewardBase
from nemorl.generation.openai_client import MissingKey, OpenAIClient
from nemorl.trajectories import Conversation, Message, Task

from .find import RewardError

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Failed:
    """There is no score, and why; the sentence names the reward."""

    reason: str


Score = float | None | Failed  # None: the reward does not apply to this answer


@dataclass(frozen=True)
class Scored:
    """The scores of some answers, one each, and what they cost."""

    scores: Sequence[Score]
    seconds: float = 0.0  # that calls took, added up; waiting for a place is not among them
    waited: float = 0.0  # seconds that calls waited for a place, added up
    retries: int | None = None  # requests that were sent again; None where there are no requests


@dataclass(frozen=True)
class ScoringMetrics:
    """How the scoring of one group went, by one reward."""

    errors: int  # trajectories that were lost to it
    seconds: float
    waited: float
    retries: int | None


@dataclass(frozen=True)
class Answers:
    """Answers to one task."""

    task: Task
    conversations: Sequence[Conversation]
    chat: bool  # functions get messages instead of texts

    def __len__(self) -> int:
        return len(self.conversations)

    @cached_property
    def columns(self) -> Columns:
        """Keyword arguments of reward functions: a list each, one entry an answer."""
        columns: Columns = {key: [value] * len(self) for key, value in self.task.columns.items()}
        columns["answer"] = [self.task.answer] * len(self)
        columns["prompts"] = [self._shape(c.opening) for c in self.conversations]
        columns["completions"] = [self._shape(c.exchange) for c in self.conversations]
        columns["completion_ids"] = [
            c.trajectory.tokens[c.num_prompt_tokens :].tolist() for c in self.conversations
        ]
        columns["sampled_ids"] = [
            c.trajectory.tokens[c.trajectory.loss_mask].tolist() for c in self.conversations
        ]
        return columns

    def _shape(self, messages: Sequence[Message]) -> str | list[dict[str, str]]:
        return as_dicts(messages) if self.chat else "".join(m.content for m in messages)


class Scorer(Protocol):
    """One reward of the `rewards` section."""

    name: str

    async def score(self, answers: Answers) -> Scored:
        """A score for each answer; what goes wrong is in them. Raises RewardError for what none can have."""
        ...

    async def close(self) -> None:
        """Release what is held."""
        ...


def as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as chat templates and servers take them."""
    return [{"role": m.role, "content": m.content} for m in messages]


def text_of(messages: Sequence[Message]) -> str:
    """What was said, one message after the other, without who said it."""
    return "\n".join(m.content for m in messages)


T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of a call: a value, or a sentence saying why there is none."""

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
    error = task.exception()
    if error is not None:
        return Outcome(failure=f"{stage}: {type(error).__name__}: {error}")
    return Outcome(value=task.result())


@dataclass(frozen=True)
class Call(Generic[T]):
    """What came of a call, and when."""

    outcome: Outcome[T]
    seconds: float
    waited: float


class Calls:
    """The calls of one reward. Belongs to one event loop."""

    def __init__(self, stage: str, most: int, seconds: float) -> None:
        """`most` at a time, each for at most `seconds`; `stage` begins the text of failures."""
        self._stage = stage
        self._places = asyncio.Semaphore(most)
        self._seconds = seconds

    async def run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> Call[T]:
        """Call as soon as there is a place. The deadline begins then: who waits here is not slow."""
        asked = time.monotonic()
        async with self._places:
            started = time.monotonic()
            outcome = await attempt(call(), self._stage, self._seconds)
        return Call(outcome, time.monotonic() - started, started - asked)


async def in_thread(function: Callable[..., T], **arguments: Any) -> T:
    """Call a function in a thread of its own, so that a slow one holds up no other conversation.

    One that never returns is left behind when the wait is cancelled, and does not keep the process from
    ending. A pool's thread would: then every later call waits behind it.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = copy_context()

    def deliver(value: Any, error: BaseException | None) -> None:
        if answer.done():  # the wait was cancelled
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)

    def run() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = context.run(function, **arguments)
        except (SystemExit, StopIteration) as exit_:  # which end an event loop or a future without a word
            error = RuntimeError(f"it raised {type(exit_).__name__}({', '.join(map(repr, exit_.args))})")
            error.__cause__ = exit_
        except Exception as failure:  # noqa: BLE001  handed to who asked
            error = failure
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return await answer


class Service:
    """The server of one reward. Belongs to one event loop."""

    def __init__(self, config: ServiceRewardBase, seconds: float) -> None:
        """`seconds` bounds a call where the config does not. Raises RewardError without its key."""
        self.name = config.metric
        try:
            self._client = OpenAIClient(
                config.url,
                api_key_env=config.api_key_env,
                max_concurrent=config.max_concurrent,
                max_retries=config.max_retries,
                key_field=f"rewards ({self.name}): api_key_env",
            )
        except MissingKey as error:
            raise RewardError(str(error)) from error
        self._calls = Calls(f"reward `{self.name}`", config.max_concurrent, config.deadline or seconds)

    async def post(self, path: str, body: Mapping[str, Any]) -> Call[dict[str, Any]]:
        """The JSON that the server answers, or why it does not."""
        return await self._calls.run(lambda: self._client.post(path, body))

    def take_retries(self) -> int:
        """Requests sent again since the last call; groups that are scored at once share them out."""
        return self._client.take_metrics().retries

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
