"""Calls of the model as token sequences that train: pure, without an engine, a template or an event loop.

An agent that owns its loop makes calls. A call continues an earlier one if its prompt begins with prompt
and answer of that one, so the calls of an episode form a prefix tree. Each path to a leaf is a branch:

    call 0 ─▶ call 1 ─▶ call 3      branches: [0, 1, 2], [0, 1, 3] and [4], in which 2 and 3 train,
                   └──▶ call 2                and 0 and 1 in the first one that has them
    call 4                                    (a sub-agent, or a history that was rewritten)
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nemorl.generation.types import Completion
from nemorl.trajectories import Int16Array, Int32Array, StopReason, Trajectory, Turn


@dataclass
class TokenSequence:
    """A token sequence while it grows. `T` is the number of its tokens; they are only ever appended."""

    tokens: list[int] = field(default_factory=list)  # [T]
    sampled: list[bool] = field(default_factory=list)  # [T]
    logprobs: list[float] = field(default_factory=list)  # [T]
    versions: list[int] = field(default_factory=list)  # [T]
    routed_experts: list[Int16Array] = field(default_factory=list)  # rows of the first tokens, turn by turn
    turns: list[Turn] = field(default_factory=list)

    @property
    def num_routed(self) -> int:
        """Tokens from the first on whose experts are known."""
        return sum(map(len, self.routed_experts))

    def add_given(self, tokens: Sequence[int]) -> None:
        """Tokens that do not train."""
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def add_turn(
        self,
        completion: Completion,
        rewards: Mapping[str, float] | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        """Tokens that train, as they were sampled."""
        start = len(self.tokens)
        self.tokens += completion.tokens.tolist()
        self.sampled += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs.tolist()
        self.versions += completion.versions.tolist()
        self.add_experts(completion)
        end, stop, seconds = len(self.tokens), completion.stop, completion.seconds
        self.turns.append(Turn(start, end, stop, dict(rewards or {}), flags=flags, seconds=seconds))

    def add_experts(self, completion: Completion) -> None:
        """Rows of what the engine read for this answer, after those that are known."""
        if completion.routed_experts is not None:
            self.routed_experts.append(completion.routed_experts)

    def trajectory(
        self,
        group: int,
        task: int,
        *,
        rewards: dict[str, float],
        stop: StopReason,
        error: str | None,
        seconds_generation: float,
        seconds_environment: float,
        player: str = "",
        fork: int = 0,
    ) -> Trajectory:
        """The sequence so far; with an error none of its tokens trains."""
        experts = None
        if self.routed_experts:
            # [T, layers, experts of a token], -1 for the tokens at the end that no engine has read.
            size = (len(self.tokens) - self.num_routed, *self.routed_experts[0].shape[1:])
            experts = np.concatenate([*self.routed_experts, np.full(size, -1, dtype=np.int16)])
        return Trajectory(
            tokens=np.array(self.tokens, dtype=np.int32),
            loss_mask=np.array(self.sampled, dtype=np.bool_) & (error is None),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            turns=tuple(self.turns),
            rewards=rewards,
            reward=0.0,
            stop=stop,
            group=group,
            task=task,
            error=error,
            seconds_generation=seconds_generation,
            seconds_environment=seconds_environment,
            player=player,
            fork=fork,
            routed_experts=experts,
        )


@dataclass(eq=False)
class Call:
    """One answer of the model and the prompt that it answers."""

    number: int  # in the order in which the calls of the episode began
    prompt: Int32Array  # [P]
    completion: Completion
    parent: "Call | None" = None  # the call that it continues
    flags: tuple[str, ...] = ()  # of the turn

    @property
    def tokens(self) -> Int32Array:
        """[P + n] prompt and answer."""
        return np.concatenate([self.prompt, self.completion.tokens])

    @property
    def path(self) -> list["Call"]:
        """The calls from the root of the tree to this one."""
        path, call = [self], self.parent
        while call is not None:
            path.append(call)
            call = call.parent
        return path[::-1]

    @property
    def num_routed(self) -> int:
        """Tokens of prompt and answer, from the first on, whose experts are known."""
        experts = (call.completion.routed_experts for call in self.path)
        return sum(len(rows) for rows in experts if rows is not None)


class Recording:
    """The calls of one episode that have ended."""

    def __init__(self) -> None:
        self.calls: list[Call] = []  # in the order of their numbers

    def continued_by(self, prompt: Int32Array) -> Call | None:
        """The call with the most tokens that this prompt begins with, the newest of several; None without."""
        best: Call | None = None
        for call in self.calls:
            tokens = call.tokens
            is_longer = best is None or len(tokens) >= len(best.prompt) + len(best.completion.tokens)
            if is_longer and np.array_equal(prompt[: len(tokens)], tokens):
                best = call
        return best

    def add(self, call: Call) -> None:
        self.calls.append(call)
        self.calls.sort(key=lambda one: one.number)

    def branches(self) -> Iterator[list[Call]]:
        """Paths to the calls that no other one continues, in the order of these; the newest is the last."""
        continued = {call.parent for call in self.calls}
        return (call.path for call in self.calls if call not in continued)

    def sequences(
        self, rewards: Mapping[int, Mapping[str, float]] | None = None, before: Collection[Call] = ()
    ) -> list[TokenSequence]:
        """The branches as tokens, each sampled token trained in the first branch that has it.

        `rewards` are those of single calls, by number. Calls of `before` do not train.
        """
        trained = set(before)
        sequences = []
        for path in self.branches():
            if path[-1] in trained:  # and all before it
                continue
            sequence = TokenSequence()
            for call in path:
                sequence.add_given(call.prompt[len(sequence.tokens) :].tolist())
                if call in trained:
                    sequence.add_given(call.completion.tokens.tolist())
                    sequence.add_experts(call.completion)
                else:
                    sequence.add_turn(call.completion, (rewards or {}).get(call.number), call.flags)
            trained.update(path)
            sequences.append(sequence)
        return sequences
