"""A conversation while it grows; it becomes a trajectory when it ends."""

from dataclasses import dataclass, field, replace

import numpy as np

from nemorl.generation.types import Completion
from nemorl.trajectories import Conversation, Int16Array, Message, Step, StopReason, Trajectory, Turn


@dataclass
class Record:
    """Tokens, their origin and the messages so far. Tokens are only ever appended."""

    opening: tuple[Message, ...] = ()
    exchange: list[Message] = field(default_factory=list)
    num_prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)  # [T]
    sampled: list[bool] = field(default_factory=list)  # [T]
    logprobs: list[float] = field(default_factory=list)  # [T]
    versions: list[int] = field(default_factory=list)  # [T]
    routed_experts: list[Int16Array] = field(default_factory=list)  # rows of the first tokens, turn by turn
    turns: list[Turn] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    stop: StopReason = StopReason.ERROR  # until a turn ends in another way
    seconds_generation: float = 0.0
    seconds_environment: float = 0.0

    def open(self, messages: tuple[Message, ...], tokens: list[int]) -> None:
        """The messages before the first turn."""
        self.opening = messages
        self.num_prompt_tokens = len(tokens)
        self._append_given(tokens)

    def add_turn(self, completion: Completion, text: str) -> None:
        """A turn as it was sampled; `text` is what it reads like without its end token."""
        start = len(self.tokens)
        self.tokens += completion.tokens.tolist()
        self.sampled += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs.tolist()
        self.versions += completion.versions.tolist()
        if completion.routed_experts is not None:
            self.routed_experts.append(completion.routed_experts)
        self.turns.append(Turn(start, len(self.tokens), completion.stop))
        self.exchange.append(Message("assistant", text))
        self.stop = completion.stop

    @property
    def num_routed(self) -> int:
        """Tokens from the first on whose experts are known."""
        return sum(len(rows) for rows in self.routed_experts)

    def add_observation(self, messages: tuple[Message, ...], tokens: list[int]) -> None:
        """What the environment answered, and the tokens up to the next turn."""
        self.exchange += messages
        self._append_given(tokens)

    def add_rewards(self, step: Step) -> None:
        """Rewards of the newest turn; those of one name add up over turns."""
        self.turns[-1] = replace(self.turns[-1], rewards=dict(step.rewards))
        for name, value in step.rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + value

    def finish(self, group: int, task: int, error: str | None) -> Conversation:
        """The conversation so far. After an error it neither trains nor has rewards."""
        tokens = np.array(self.tokens, dtype=np.int32)
        failed = error is not None
        trajectory = Trajectory(
            tokens=tokens,
            loss_mask=np.zeros(len(tokens), dtype=np.bool_)
            if failed
            else np.array(self.sampled, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            turns=tuple(self.turns),
            rewards={} if failed else dict(self.rewards),
            reward=0.0,
            stop=StopReason.ERROR if failed and self.stop is not StopReason.ABORT else self.stop,
            group=group,
            task=task,
            error=error,
            seconds_generation=self.seconds_generation,
            seconds_environment=self.seconds_environment,
            routed_experts=self._all_experts(),
        )
        return Conversation(trajectory, self.opening, tuple(self.exchange), self.num_prompt_tokens)

    def _all_experts(self) -> Int16Array | None:
        """[T, layers, experts of a token], -1 for the tokens at the end that no engine has read."""
        if not self.routed_experts:
            return None
        size = (len(self.tokens) - self.num_routed, *self.routed_experts[0].shape[1:])
        return np.concatenate([*self.routed_experts, np.full(size, -1, dtype=np.int16)])

    def _append_given(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)
