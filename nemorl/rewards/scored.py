"""What a reward is shown, and what it says of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from nemorl.trajectories import Conversation, Message, Task

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
