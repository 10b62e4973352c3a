"""What flows from sampling to training. Environments see only this module; it imports no torch and no Ray."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Int16Array = NDArray[np.int16]
Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class StopReason(StrEnum):
    """Why a turn or a trajectory ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # the token limit of the turn or of the sequence
    TOOL_CALLS = "tool_calls"  # the turn ended in a call of a tool
    ABORT = "abort"  # cancelled from outside
    DEADLINE = "deadline"  # not finished within `algorithm.group_seconds`
    ERROR = "error"  # the environment or the engine failed


@dataclass(frozen=True)
class Message:
    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True)
class Task:
    index: int  # position in its dataset
    messages: tuple[Message, ...]  # the opening of the conversation, as the dataset has it
    answer: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)  # further columns of the dataset, given to rewards


@dataclass(frozen=True)
class Action:
    text: str  # decoded, without the end token
    tokens: Int32Array  # [n] as sampled, end token included
    stop: StopReason


@dataclass(frozen=True)
class Step:
    """What an environment answers to an action."""

    messages: tuple[Message, ...] = ()  # the observation; empty when done
    rewards: dict[str, float] = field(default_factory=dict)  # by name; summed over turns
    done: bool = True
    num_retries: int = 0  # of what the environment had to do again, since it lost a process


class EnvironmentLost(RuntimeError):
    """Raised by an environment whose process or service is gone.

    The trajectory is sampled again in a new environment, for as long as `cluster.deadlines.outage`.
    """


class Environment(Protocol):
    """A step-driven environment: one instance serves one trajectory."""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The messages that open the conversation; by default the task's own."""
        return task.messages

    async def step(self, action: Action) -> Step:
        """Act once; called until it answers `done` or the sequence is full."""

    async def close(self) -> None:
        """Release what the environment holds; called once, also after an error."""
        return


class EnvironmentFactory(Protocol):
    """Makes environments of one kind; holds what they share, such as a scoring process."""

    reward_weights: dict[str, float]  # of the rewards that its environments give, by name

    def create(self) -> Environment:
        """An environment for one trajectory."""

    async def close(self) -> None:
        """Release what is shared; called once."""
        return


class SingleTurnEnvironment(Environment):
    """One answer and no reward of its own: `rewards` score it."""

    async def step(self, action: Action) -> Step:
        return Step()


class SingleTurnFactory(EnvironmentFactory):
    def __init__(self, _: object) -> None:
        self.reward_weights = {}

    def create(self) -> SingleTurnEnvironment:
        return SingleTurnEnvironment()


@dataclass(frozen=True)
class Turn:
    """Where one turn of the policy lies in the trajectory's tokens."""

    start: int  # first sampled token
    end: int  # one past the last sampled token
    stop: StopReason
    rewards: dict[str, float] = field(default_factory=dict)  # given by the environment, before weights
    reward: float = 0.0  # the weighted sum of these


@dataclass(frozen=True)
class Trajectory:
    """One sampled conversation, token-exact. `T` is the number of its tokens.

    Sampled tokens are never decoded and encoded again; `logprobs` are those of the distribution that was
    sampled (after temperature, top-k, top-p and min-p) and `versions` the weights that sampled each token.
    """

    tokens: Int32Array  # [T]
    loss_mask: BoolArray  # [T] True where the policy sampled the token
    logprobs: Float32Array  # [T] 0 elsewhere
    versions: Int32Array  # [T] -1 elsewhere
    turns: tuple[Turn, ...]
    rewards: dict[str, float]  # by name, summed over turns, before weights; absent = not applicable
    reward: float  # the weighted sum
    stop: StopReason
    group: int  # trajectories of one task share it; unique in a run
    task: int  # index of the task in its dataset
    error: str | None = None
    seconds_generation: float = 0.0
    seconds_environment: float = 0.0
    # [T, layers with experts, experts of a token] the experts that the engine chose, -1 where it does not say
    routed_experts: Int16Array | None = None

    def __post_init__(self) -> None:
        arrays = (self.tokens, self.loss_mask, self.logprobs, self.versions, self.routed_experts)
        lengths = {len(a) for a in arrays if a is not None}
        if len(lengths) != 1:
            raise ValueError(f"arrays of one trajectory differ in length: {sorted(lengths)}")

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled; after an error too, where none of them trains."""
        return int((self.versions >= 0).sum())


@dataclass(frozen=True)
class Conversation:
    """A trajectory with its messages. Rewards of functions are not in it yet."""

    trajectory: Trajectory
    opening: tuple[Message, ...]
    exchange: tuple[Message, ...]  # the policy's turns and what was answered to them
    num_prompt_tokens: int
