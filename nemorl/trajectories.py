"""What flows from sampling to training. Environments see only this module; it imports no torch and no Ray."""

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Int16Array = NDArray[np.int16]
Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
T = TypeVar("T")


class StopReason(StrEnum):
    """Why a turn or a trajectory ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # the token limit of the turn or of the sequence
    TOOL_CALLS = "tool_calls"  # the turn ended in a call of a tool
    ABORT = "abort"  # cancelled from outside
    DEADLINE = "deadline"  # not finished within `algorithm.group_seconds`
    ERROR = "error"  # the environment or the engine failed


@dataclass(frozen=True)
class ToolCall:
    id: str  # joins the call and its result
    name: str
    arguments: dict[str, Any]  # values of JSON

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True)
class Message:
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant's message
    reasoning: str | None = None  # of an assistant's message, where it is not part of the content
    tool_call_id: str | None = None  # of the call that a tool's message answers
    name: str | None = None  # of the tool that answers

    def as_dict(self) -> dict[str, Any]:
        """The message as chat templates and reward functions take it: what it lacks is left out."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        named = {"tool_call_id": self.tool_call_id, "name": self.name}
        return message | {key: value for key, value in named.items() if value is not None}


@dataclass(frozen=True)
class Task:
    index: int  # position in its dataset
    messages: tuple[Message, ...]  # the opening of the conversation, as the dataset has it
    answer: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)  # further columns of the dataset, given to rewards
    tools: Sequence[Mapping[str, Any]] = ()  # of the dataset, in OpenAI's form (`ToolSchemas`)


@dataclass(frozen=True)
class Reply:
    """What a turn says, read in the format of the model's family."""

    content: str  # without reasoning and calls; a call that cannot be read stays in it
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    call_errors: tuple[str, ...] = ()  # of calls that cannot be read, in words for the model


@dataclass(frozen=True)
class Action:
    text: str  # decoded, without the end token
    tokens: Int32Array  # [n] as sampled, end token included
    stop: StopReason
    reply: Reply | None = None  # the text, read; None of plain text

    @property
    def content(self) -> str:
        """The text without reasoning and calls."""
        return self.text if self.reply is None else self.reply.content

    @property
    def reasoning(self) -> str | None:
        return None if self.reply is None else self.reply.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return () if self.reply is None else self.reply.tool_calls

    @property
    def call_errors(self) -> tuple[str, ...]:
        return () if self.reply is None else self.reply.call_errors


@dataclass(frozen=True)
class Step:
    """What an environment answers to an action."""

    messages: tuple[Message, ...] = ()  # the observation; empty when done
    rewards: dict[str, float] = field(default_factory=dict)  # by name; summed over turns
    done: bool = True
    num_retries: int = 0  # of what the environment had to do again, since it lost a process
    stop_strings: tuple[str, ...] = ()  # that end the next turn, besides those of the run; they stay in it


def add_rewards(rewards: Mapping[str, float], total: dict[str, float]) -> None:
    """Add to a total by name, in place."""
    for name, value in rewards.items():
        total[name] = total.get(name, 0.0) + value


class EnvironmentLost(RuntimeError):
    """Raised by an environment whose process or service is gone.

    The trajectory is sampled again in a new environment, for as long as `cluster.deadlines.outage`.
    """


# Functions as in OpenAI's API: {"type": "function", "function": {"name", "description", "parameters"}}.
ToolSchemas = Sequence[Mapping[str, Any]]


class Environment(Protocol):
    """A step-driven environment: one instance serves one trajectory."""

    tools: ToolSchemas = ()  # that the policy may call; read after `reset` and shown by the chat template
    # Those that end the first turn, as those of a `Step` the next; read after `reset`.
    stop_strings: Sequence[str] = ()

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The messages that open the conversation; by default the task's own."""
        return task.messages

    async def step(self, action: Action) -> Step:
        """Act once; called until it answers `done` or the sequence is full."""

    async def close(self) -> None:
        """Release what the environment holds; called once, also after an error."""
        return


@dataclass(frozen=True, kw_only=True)
class Answer(Action):
    """What the model answers to a call of an episode."""

    id: str  # by which `Episode.answer_rewards` names it
    message: Message  # to append to the conversation


class EpisodeTruncated(Exception):
    """Raised by a call of the model for which a limit leaves no room; no later call has room either."""


class Model(Protocol):
    """The policy, as an episode-driven environment sees it. Its calls are recorded, and they train."""

    name: str  # in requests to the endpoint
    base_url: str  # of an OpenAI endpoint for this episode, with /v1
    api_key: str

    async def chat(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        """Sample one answer. Several calls may run at a time. Raises EpisodeTruncated."""

    def player(self, name: str) -> "Model":
        """The policy as one of several players of the episode, with a trajectory and rewards of its own.

        The same name is the same player. Raises ValueError for a name that metrics cannot have.
        """

    def fork(self) -> "Model":
        """The same player on another path: a further trajectory of its group, with rewards of its own.

        It begins with the calls that have ended, which train in the path where they were sampled.
        """


@dataclass(frozen=True)
class Episode:
    """How an episode went; its tokens are those that the model's calls recorded."""

    rewards: dict[str, float] = field(default_factory=dict)  # by name, of the whole; of each player and fork
    # Of single answers, by their id: on the last one of a branch, those of the branch. They add to the whole.
    answer_rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)  # given to the functions of `rewards`
    player_rewards: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # of players, by name; of their forks too


class EpisodeEnvironment(Protocol):
    """An episode-driven environment, which owns its loop: one instance serves one episode."""

    async def run(self, task: Task, model: Model) -> Episode:
        """Call the model as often as needed, and say what it earned."""

    async def close(self) -> None:
        """Release what the environment holds; called once, also after an error."""
        return


class EnvironmentFactory(Protocol):
    """Makes environments of one kind; holds what they share, such as a scoring process."""

    reward_weights: dict[str, float]  # of the rewards that its environments give, by name

    def create(self) -> Any:
        """An environment for one trajectory: an `Environment` or an `EpisodeEnvironment`."""

    async def close(self) -> None:
        """Release what is shared; called once."""
        return


async def called(
    function: Callable[..., Coroutine[Any, Any, T]],
    *arguments: Any,
    problem_of: Callable[[Any], str | None] = lambda answer: None,
) -> T:
    """The answer of an environment's coroutine function. Raises what it raises, and TypeError for a problem.

    SystemExit, which would end the event loop and with it all other conversations, becomes a RuntimeError.
    """
    try:
        answer = await function(*arguments)
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error
    if (problem := problem_of(answer)) is not None:
        raise TypeError(problem)
    return answer


def created(factory: EnvironmentFactory) -> Any:
    """A new environment. Raises what `create` raises, and TypeError for what is no environment.

    SystemExit becomes a RuntimeError, as in `called`.
    """
    try:
        environment = factory.create()
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error
    methods = ("reset", "step", "close") if hasattr(environment, "step") else ("run", "close")
    if missing := [name for name in methods if not callable(getattr(environment, name, None))]:
        raise TypeError(f"returned {shown(environment)}, which has no `{missing[0]}`; return an environment")
    return environment


def opening_problem(opening: Any) -> str | None:
    """What is wrong with the answer of `reset`, if anything is."""
    if opening and _are_messages(opening):
        return None
    return f"returned {shown(opening)}; return a tuple of Messages, at least one"


def step_problem(step: Any) -> str | None:
    """What is wrong with the answer of `step`, if anything is."""
    if not isinstance(step, Step):
        return f"returned {shown(step)}; return a Step"
    if not _are_messages(step.messages):
        return f"returned the messages {shown(step.messages)}; return a tuple of Messages"
    if not isinstance(step.done, bool):
        return f"returned done={shown(step.done)}; return True or False"
    if problem := stop_strings_problem(step.stop_strings):
        return f"returned the stop_strings {problem}"
    return rewards_problem(step.rewards)


def episode_problem(episode: Any) -> str | None:
    """What is wrong with the answer of `run`, if anything is."""
    if not isinstance(episode, Episode):
        return f"it returned {shown(episode)}; return an Episode"
    of_parts = (*episode.player_rewards.values(), *episode.answer_rewards.values())
    problems = map(rewards_problem, (episode.rewards, *of_parts))
    return next((problem for problem in problems if problem is not None), None)


def rewards_problem(rewards: Any) -> str | None:
    if not isinstance(rewards, Mapping):
        return f"gave the rewards {shown(rewards)}; return a dict of names and numbers"
    for name, reward in rewards.items():
        if not is_number(reward):
            return f"gave the reward {name!r} the value {shown(reward)}; return a finite number"
    return None


def stop_strings_problem(value: Any) -> str | None:
    """For what is no collection of texts; a text alone would be one of letters."""
    if isinstance(value, list | tuple) and all(isinstance(one, str) and one for one in value):
        return None
    return f"{shown(value)}; give a tuple of texts that are not empty"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _are_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(message, Message) for message in value)


class SingleTurnEnvironment(Environment):
    """One answer and no reward of its own: `rewards` score it. The task's tools are shown, and not called."""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        self.tools = task.tools
        return task.messages

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
    # Given by the environment, and by rewards of steps, before weights.
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0  # the weighted sum of these
    # The last token of each step, and what it earned, weighted: parts of `reward`.
    steps: tuple[tuple[int, float], ...] = ()
    flags: tuple[str, ...] = ()  # names of `env.turn_flags` that fit what it says
    seconds: float = field(default=0.0, compare=False)  # of its generation, with the wait for the engine


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
    player: str = ""  # of an episode with several, each of which has a trajectory
    fork: int = 0  # of its sample, from 1 on; 0 of what was not forked
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
    """A sample with its messages. Rewards of functions are not in it yet."""

    trajectory: Trajectory
    opening: tuple[Message, ...]
    exchange: tuple[Message, ...]  # the policy's turns and what was answered to them
    num_prompt_tokens: int
    earlier: tuple[Trajectory, ...] = ()  # branches before the last one, with turns that it does not train
    columns: dict[str, Any] = field(default_factory=dict)  # of its episode, for rewards
