"""What passes between the driver and the rollout workers: assignments and summaries, never token arrays."""

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import numpy as np

from nemorl.data.prefixes import Run
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
class Branch:
    """One of several token sequences of a sample, which share its reward. Each sampled token is in one."""

    row: int  # place in the list behind the group's reference
    num_tokens: int
    num_sampled: int
    turn_rewards: tuple[float, ...] = ()  # of its turns
    turn_flags: tuple[tuple[str, ...], ...] = ()  # of its turns; empty if none has a flag
    runs: tuple[Run, ...] = ()  # that it shares with other sequences of its group


@dataclass(frozen=True)
class TrajectorySummary:
    """A sample, or one player's part of it: one token sequence, or several that are its branches."""

    row: int  # place in the list behind the group's reference; of branches that of the last one
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
    turn_rewards: tuple[float, ...] = ()  # of each turn, weighted: those of the environment and of steps
    turn_flags: tuple[tuple[str, ...], ...] = ()  # of each turn; empty if none has a flag
    answer: str | None = None  # canonical final answer; in validations with votes
    trains: bool = True  # False after an error, or where a filter takes it out
    environment_failed: bool = False
    truncated: bool = False  # by a limit of its episode
    num_retries: int = 0  # attempts before this one, and what its environment did again
    player: str = ""  # of an episode with several: each has a summary
    fork: int = 0  # of its sample, from 1 on; 0 of what was not forked
    branches: tuple[Branch, ...] = ()  # at least two, the last one included, or none
    runs: tuple[Run, ...] = ()  # as those of a branch; of branches those of the last one

    @property
    def sequences(self) -> "Sequence[Branch | TrajectorySummary]":
        """The branches, or the sample itself, which is its only sequence then."""
        return self.branches or (self,)

    def with_runs(self, runs: Sequence[tuple[Run, ...]]) -> "TrajectorySummary":
        """With the shared runs of its sequences, given for all rows of the list."""
        branches = tuple(replace(branch, runs=runs[branch.row]) for branch in self.branches)
        return replace(self, runs=runs[self.row], branches=branches)

    def moved(self, rows: int) -> "TrajectorySummary":
        branches = tuple(replace(branch, row=branch.row + rows) for branch in self.branches)
        return replace(self, row=self.row + rows, branches=branches)

    @property
    def num_trained(self) -> int:
        """Tokens that a loss may count."""
        return self.num_sampled if self.trains else 0

    @property
    def versions(self) -> range:
        """Of the weights between the first and the last sampled token; empty when none was sampled."""
        return range(self.min_version, self.max_version + 1) if self.min_version >= 0 else range(0)


@dataclass(frozen=True)
class SampleText:
    sample: int  # of the group
    prompt: str
    completion: str
    answer: str | None = None  # what the task expects


@dataclass(frozen=True)
class GroupSummary:
    group: int
    task_index: int
    reference: Any  # of a list with its trajectories, which may be those of other groups too
    trajectories: tuple[TrajectorySummary, ...]
    texts: tuple[SampleText, ...] = ()
    greedy: TrajectorySummary | None = None  # the additional greedy sample; not in the list
    scoring: Mapping[str, ScoringMetrics] = field(default_factory=dict)  # by reward, of those computed
    environment: str = ""  # its name, where the run has several
    flags: tuple[str, ...] = ()  # that its turns may have
    node: str = ""  # ID of the node that has its trajectories, in a run over several

    def moved(self, rows: int) -> "GroupSummary":
        """For a list in which its trajectories begin after this number of others."""
        return replace(self, trajectories=tuple(t.moved(rows) for t in self.trajectories)) if rows else self

    @property
    def sequences(self) -> "list[Branch | TrajectorySummary]":
        """The token sequences of its samples, failed ones included."""
        return [sequence for t in self.trajectories for sequence in t.sequences]

    def of_player(self, player: str) -> "GroupSummary":
        """The group with the trajectories of one player only."""
        return self.only([place for place, t in enumerate(self.trajectories) if t.player == player])

    def only(self, places: Sequence[int]) -> "GroupSummary":
        """The group with the trajectories at these places, in ascending order, only."""
        if len(places) == len(self.trajectories):
            return self
        return replace(self, trajectories=tuple(self.trajectories[place] for place in places))

    @property
    def by_player(self) -> list["GroupSummary"]:
        """A group for each player, whose trajectories are comparable; without players only this one."""
        players = dict.fromkeys(t.player for t in self.trajectories if t.error is None)
        return [self.of_player(player) for player in players] if len(players) > 1 else [self]

    @property
    def num_samples(self) -> int:
        """Episodes, of which players and forks have a trajectory each."""
        counts = Counter(t.player for t in self.trajectories if not t.fork)
        without_players = counts.pop("", 0)
        return without_players + max(counts.values(), default=0)

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


def summarize(sequences: Sequence[Trajectory], row: int, num_unfinished: int = 0) -> TrajectorySummary:
    """Summarize a sample: its sequences, from this row on; the last one has what is said of all.

    `num_unfinished`: tokens of a turn that did not end, which are not in the sequences.
    """
    last, turns = sequences[-1], [[turn.reward for turn in t.turns] for t in sequences]
    flags = [_flags([turn.flags for turn in t.turns]) for t in sequences]
    versions = np.concatenate([t.versions[t.versions >= 0] for t in sequences])
    branches = [
        Branch(row + number, t.num_tokens, t.num_sampled, tuple(rewards), of_turns)
        for number, (t, rewards, of_turns) in enumerate(zip(sequences, turns, flags, strict=True))
    ]
    return TrajectorySummary(
        row=branches[-1].row,
        reward=last.reward,
        rewards=last.rewards,
        num_tokens=sum(t.num_tokens for t in sequences) + num_unfinished,
        num_sampled=sum(t.num_sampled for t in sequences) + num_unfinished,
        num_turns=sum(map(len, turns)),
        stop=last.stop,
        min_version=int(versions.min()) if len(versions) else -1,
        max_version=int(versions.max()) if len(versions) else -1,
        error=last.error,
        seconds_generation=last.seconds_generation,
        seconds_environment=last.seconds_environment,
        turn_rewards=tuple(chain(*turns)),
        turn_flags=_flags([turn.flags for t in sequences for turn in t.turns]),
        trains=last.error is None,
        player=last.player,
        fork=last.fork,
        branches=tuple(branches) if len(branches) > 1 else (),
    )


def _flags(of_turns: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(of_turns) if any(of_turns) else ()


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
