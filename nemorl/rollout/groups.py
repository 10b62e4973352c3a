"""What passes between the driver and the rollout workers: assignments and summaries, never token arrays."""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nemorl.rewards.scored import ScoringMetrics
from nemorl.trajectories import Conversation, StopReason, Trajectory


@dataclass(frozen=True)
class GroupAssignment:
    group: int  # position in the order of the tasks, or the number of a task in one validation
    task_index: int  # in the training or the validation dataset
    num_samples: int
    validation: bool = False
    validation_set: str = ""  # of `data.validation_sets`; empty: `data.validation`
    num_texts: int = 0  # samples of which the summary carries the text
    greedy_baseline: bool = False  # one sample more, at temperature 0, which is scored and does not train
    attempt: int = 0  # earlier attempts at this group, which were lost or became too old


@dataclass(frozen=True)
class TrajectorySummary:
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
    environment_failed: bool = False
    num_retries: int = 0  # attempts before this one, and what its environment did again

    @property
    def versions(self) -> range:
        """Of the weights between the first and the last sampled token; empty when none was sampled."""
        return range(self.min_version, self.max_version + 1) if self.min_version >= 0 else range(0)


@dataclass(frozen=True)
class SampleText:
    row: int
    prompt: str
    completion: str
    answer: str | None = None  # what the task expects


@dataclass(frozen=True)
class GroupSummary:
    group: int
    task_index: int
    reference: Any  # what `store` gave for its list of trajectories
    trajectories: tuple[TrajectorySummary, ...]
    texts: tuple[SampleText, ...] = ()
    greedy: TrajectorySummary | None = None  # the additional greedy sample; not in the list
    scoring: Mapping[str, ScoringMetrics] = field(default_factory=dict)  # by reward, of those computed

    @property
    def min_version(self) -> int:
        """Of the oldest weights that sampled a token; very large if none was sampled."""
        return min((t.min_version for t in self.trajectories if t.min_version >= 0), default=sys.maxsize)


# Finished too late to train on, ended while it was sampled for the same reason, not among the first of an
# over-sampled step, too few members finished before the group's deadline, its worker died, it was sampled by
# updates that were discarded, or an environment or a reward with `on_error: drop_group` failed.
DropReason = Literal["too_old", "aborted", "cut_off", "deadline", "lost", "discarded", "failed"]


@dataclass(frozen=True)
class Dropped:
    """An attempt at a group that nothing is trained on."""

    group: int
    reason: DropReason
    lengths: tuple[int, ...] = ()  # tokens that its trajectories had sampled when it ended
    rewards: tuple[float, ...] = ()  # of its trajectories, as far as they were scored

    @classmethod
    def of_summary(cls, group: GroupSummary, reason: DropReason) -> "Dropped":
        members = group.trajectories
        rewards = tuple(t.reward for t in members if t.error is None)
        return cls(group.group, reason, tuple(t.num_sampled for t in members), rewards)


def misses_deadline(members: Sequence[Trajectory | TrajectorySummary], min_members: int) -> bool:
    """True if a deadline has left fewer finished members of a group than it needs."""
    num_finished = sum(member.error is None for member in members)
    return num_finished < min_members and any(member.stop is StopReason.DEADLINE for member in members)


def summarize(trajectory: Trajectory, row: int, num_unfinished: int = 0) -> TrajectorySummary:
    """`num_unfinished`: tokens of a turn that did not end, which are not in the trajectory."""
    sampled = trajectory.versions[trajectory.versions >= 0]
    return TrajectorySummary(
        row=row,
        reward=trajectory.reward,
        rewards=trajectory.rewards,
        num_tokens=trajectory.num_tokens + num_unfinished,
        num_sampled=trajectory.num_sampled + num_unfinished,
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


async def last_answer(conversation: Conversation, environments: object) -> str | None:
    """The answer in the policy's last message, as the environment's factory reads it, else the whole message.

    A factory reads answers if it has `async answer_in(text)`, which returns the same text for equal answers
    and None without one. None after an error, and where nothing is said.
    """
    if conversation.trajectory.error is not None:
        return None
    said = (message.content for message in reversed(conversation.exchange) if message.role == "assistant")
    answer: str | None = next(said, "")
    if (read := getattr(environments, "answer_in", None)) is not None:
        answer = await read(answer)
    answer = " ".join((answer or "").split())
    return hashlib.sha256(answer.encode()).hexdigest() if len(answer) > _MAX_LENGTH else answer or None
