"""Assignments of the driver to rollout workers and their summaries: metadata, never token arrays."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from nemorl.rewards.scored import ScoringMetrics
from nemorl.trajectories import Conversation, StopReason, Trajectory


@dataclass(frozen=True)
class GroupAssignment:
    """Sample one task several times."""

    group: int  # unique among training groups of a run, and among validation groups of one validation
    task_index: int  # in the training or the validation dataset
    num_samples: int
    validation: bool = False
    validation_set: str = ""  # of `data.validation_sets`; empty: `data.validation`
    num_texts: int = 0  # samples of which the summary carries the text
    greedy_baseline: bool = False  # one sample more, at temperature 0, which is scored and does not train


@dataclass(frozen=True)
class TrajectorySummary:
    """All that the driver knows of one trajectory."""

    row: int  # place in the list behind the group's reference
    reward: float  # the weighted sum
    rewards: dict[str, float]  # by name, before weights; absent = not applicable
    num_tokens: int
    num_sampled: int  # tokens of the policy; after an error too, where none of them trains
    num_turns: int
    stop: StopReason
    min_version: int  # oldest weights that sampled a token; -1 when none was sampled
    max_version: int
    error: str | None
    seconds_generation: float
    seconds_environment: float
    turn_rewards: tuple[float, ...] = ()  # of each turn, weighted; the environment's alone
    answer: str | None = None  # canonical final answer; in validations with votes
    trains: bool = True  # False after an error, or where a filter takes it out


@dataclass(frozen=True)
class SampleText:
    """One trajectory as text, special tokens included."""

    row: int
    prompt: str
    completion: str
    answer: str | None = None  # what the task expects


@dataclass(frozen=True)
class GroupSummary:
    """One sampled group. `reference` is what `store` gave for its list of trajectories."""

    group: int
    task_index: int
    reference: Any
    trajectories: tuple[TrajectorySummary, ...]
    texts: tuple[SampleText, ...] = ()
    greedy: TrajectorySummary | None = None  # the additional greedy sample; not in the list
    scoring: Mapping[str, ScoringMetrics] = field(default_factory=dict)  # by reward, of those computed


def summarize(trajectory: Trajectory, row: int) -> TrajectorySummary:
    """The summary of a trajectory at `row` of its group's list."""
    sampled = trajectory.versions[trajectory.versions >= 0]
    return TrajectorySummary(
        row=row,
        reward=trajectory.reward,
        rewards=trajectory.rewards,
        num_tokens=trajectory.num_tokens,
        num_sampled=trajectory.num_sampled,
        num_turns=len(trajectory.turns),
        stop=trajectory.stop,
        min_version=int(sampled.min()) if len(sampled) else -1,
        max_version=int(sampled.max()) if len(sampled) else -1,
        error=trajectory.error,
        seconds_generation=trajectory.seconds_generation,
        seconds_environment=trajectory.seconds_environment,
        turn_rewards=tuple(turn.reward for turn in trajectory.turns),
        trains=trajectory.error is None,
    )


_MAX_LENGTH = 200  # characters that go to the driver; of longer answers their hash


@runtime_checkable
class ReadsAnswers(Protocol):
    """A factory of environments that knows where in a text the answer is."""

    async def answer_in(self, text: str) -> str | None:
        """The answer, the same text for equal answers; None without one."""
        ...


async def last_answer(conversation: Conversation, environments: object) -> str | None:
    """The answer in the policy's last message, as the environment reads it, else the whole message.

    None after an error, and where nothing is said.
    """
    if conversation.trajectory.error is not None:
        return None
    texts = [message.content for message in conversation.exchange if message.role == "assistant"]
    text = texts[-1] if texts else ""
    if isinstance(environments, ReadsAnswers):
        answer = await environments.answer_in(text)
    else:
        answer = text
    answer = " ".join((answer or "").split())
    if len(answer) > _MAX_LENGTH:
        return hashlib.sha256(answer.encode()).hexdigest()
    return answer or None
