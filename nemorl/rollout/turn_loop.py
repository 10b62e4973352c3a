"""One conversation between the policy and an environment, token-exact.

task ─reset▶ opening ─▶ tokens ─▶ [ generate ─▶ step ─▶ observation ─▶ tokens ]… ─▶ Trajectory
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from nemorl.data.tokenizer import Prompts, Tokenizer, TokenizerError
from nemorl.generation.types import Completion, GenerationRequest, Generator, SamplingParams
from nemorl.rewards.scored import Service, attempt
from nemorl.trajectories import (
    Action,
    Conversation,
    Environment,
    EnvironmentLost,
    Int16Array,
    Int32Array,
    Message,
    Step,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

# Ended from outside, while nothing had failed.
_CUT_SHORT = frozenset({StopReason.ABORT, StopReason.DEADLINE})


@dataclass
class Record:
    """A conversation while it grows. Tokens are only ever appended."""

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
    # Also of the turn that has not ended.
    oldest_version: int | None = None  # of the weights that sampled any token
    num_unfinished: int = 0  # tokens of that turn
    seconds_generation: float = 0.0
    seconds_environment: float = 0.0
    failure: BaseException | None = None  # of the environment
    num_retries: int = 0  # attempts before this one, and what the environment did again

    def restart(self) -> None:
        """Begin again, after an attempt that failed."""
        fresh = Record(
            num_retries=self.num_retries + 1,
            seconds_generation=self.seconds_generation,
            seconds_environment=self.seconds_environment,
        )
        self.__dict__.update(fresh.__dict__)

    def open(self, messages: tuple[Message, ...], tokens: list[int]) -> None:
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
        self.note(completion.versions)
        self.num_unfinished = 0
        if completion.routed_experts is not None:
            self.routed_experts.append(completion.routed_experts)
        self.turns.append(Turn(start, len(self.tokens), completion.stop))
        self.exchange.append(Message("assistant", text))
        self.stop = completion.stop

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled) + self.num_unfinished

    @property
    def num_routed(self) -> int:  # tokens from the first on whose experts are known
        return sum(len(rows) for rows in self.routed_experts)

    def note(self, versions: Int32Array) -> None:
        """Take the versions of tokens of a turn that has not ended."""
        known = () if self.oldest_version is None else (self.oldest_version,)
        self.oldest_version = min((*known, *versions.tolist()), default=None)
        self.num_unfinished += len(versions)

    def add_observation(self, messages: tuple[Message, ...], tokens: list[int]) -> None:
        self.exchange += messages
        self._append_given(tokens)

    def add_rewards(self, step: Step) -> None:
        """Rewards of the newest turn; those of one name add up over turns."""
        self.turns[-1] = replace(self.turns[-1], rewards=dict(step.rewards))
        for name, value in step.rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + value
        self.num_retries += step.num_retries

    def finish(self, group: int, task: int, error: str | None) -> Conversation:
        """The conversation so far. After an error it neither trains nor has rewards."""
        failed, experts = error is not None, None
        if self.routed_experts:
            # [T, layers, experts of a token], -1 for the tokens at the end that no engine has read.
            size = (len(self.tokens) - self.num_routed, *self.routed_experts[0].shape[1:])
            experts = np.concatenate([*self.routed_experts, np.full(size, -1, dtype=np.int16)])
        trajectory = Trajectory(
            tokens=np.array(self.tokens, dtype=np.int32),
            loss_mask=np.array(self.sampled, dtype=np.bool_) & (not failed),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            turns=tuple(self.turns),
            rewards={} if failed else dict(self.rewards),
            reward=0.0,
            stop=StopReason.ERROR if failed and self.stop not in _CUT_SHORT else self.stop,
            group=group,
            task=task,
            error=error,
            seconds_generation=self.seconds_generation,
            seconds_environment=self.seconds_environment,
            routed_experts=experts,
        )
        return Conversation(trajectory, self.opening, tuple(self.exchange), self.num_prompt_tokens)

    def _append_given(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)


log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class TurnLimits:
    max_sequence_length: int  # tokens, prompt included
    max_new_tokens: int  # of one turn
    stop_token_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    generation_seconds: float  # of one turn
    environment_seconds: float  # of one call


@dataclass(frozen=True)
class SampleKey:
    """Which sample of a run this is; it alone decides the seeds of the sample's turns.

    In a validation another attempt has the same seeds, so that its result does not depend on faults.
    """

    run_seed: int
    group: int
    sample: int
    validation: bool = False
    attempt: int = 0

    def seed(self, turn: int) -> int:
        """A seed of 63 bits, unlike that of any other turn of the run."""
        entropy: tuple[int, ...] = (self.run_seed, int(self.validation), self.group, self.sample, turn)
        entropy += (self.attempt,) * (self.attempt > 0 and not self.validation)
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1

    def __str__(self) -> str:
        again = f".{self.attempt}" if self.attempt else ""
        return f"{'validation-' if self.validation else ''}{self.group}{again}/{self.sample}"


class ConversationFailed(RuntimeError):
    """One conversation failed; the message names the stage."""


class TurnLoop:
    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        prompts: Prompts,
        limits: TurnLimits,
        environments: Service | None = None,
    ) -> None:
        self._generator, self._limits = generator, limits
        self._tokenizer, self._prompts = tokenizer, prompts
        self._environments = environments or Service("the environment")

    async def run(
        self,
        task: Task,
        environment: Environment,
        key: SampleKey,
        sampling: SamplingParams,
        record: Record | None = None,
        seconds: float | None = None,
    ) -> Conversation:
        """Converse until the environment is done, the sequence is full or something fails.

        A failing or hanging environment, a template that refuses the conversation, an aborted turn and the
        end of `seconds` end this trajectory alone: its `error` names the stage and none of its tokens trains.
        The environment is closed in every case. An exception of the generator is raised. `record`, if given,
        is the conversation while it grows.
        """
        record, error = Record() if record is None else record, None
        try:
            async with asyncio.timeout(seconds) as limit:
                await self._converse(record, task, environment, key, sampling)
        except TimeoutError:
            if not limit.expired():
                raise
            record.stop = StopReason.DEADLINE
            error = f"not finished within {seconds:g} s (`algorithm.group_seconds`)"
            log.warning("sample %s of task %d: %s", key, task.index, error)
        except (ConversationFailed, TokenizerError) as failure:
            error = str(failure)
            log.warning("sample %s of task %d: %s", key, task.index, error)
        finally:
            closed = await attempt(environment.close(), "environment close", self._limits.environment_seconds)
        if closed.failure is not None:
            log.warning("sample %s of task %d: %s", key, task.index, closed.failure)
        return record.finish(key.group, task.index, error)

    async def _converse(
        self, record: Record, task: Task, environment: Environment, key: SampleKey, sampling: SamplingParams
    ) -> None:
        limit = self._limits.max_sequence_length
        opening = await self._ask(record, environment.reset(task), "environment reset")
        record.open(opening, self._prompts.open(opening))
        if not record.tokens:
            raise ConversationFailed("prompt: no tokens, so there is nothing to condition the first one on")
        if (count := len(record.tokens)) >= limit:
            problem = f"prompt: {count} tokens leave no room in `policy.max_sequence_length` of {limit}"
            raise ConversationFailed(problem)
        while True:
            action = await self._sample_turn(record, key, sampling)
            turn = len(record.turns)
            step = await self._ask(record, environment.step(action), f"environment step {turn}")
            record.add_rewards(step)
            if step.done or action.stop is StopReason.LENGTH:
                return
            history = (*record.opening, *record.exchange[:-1])
            last_token = int(action.tokens[-1]) if len(action.tokens) else None
            tokens = self._prompts.after_turn(history, record.exchange[-1], step.messages, last_token)
            if len(record.tokens) + len(tokens) >= limit:  # no room is left for a turn after it
                record.stop = StopReason.LENGTH
                return
            record.add_observation(step.messages, tokens)

    async def _sample_turn(self, record: Record, key: SampleKey, sampling: SamplingParams) -> Action:
        """One turn. Its tokens are kept as sampled; its text is only for the environment."""
        limits, start, turn = self._limits, time.monotonic(), len(record.turns)
        request = GenerationRequest(
            id=f"{key}/{turn}",
            prompt=np.array(record.tokens, dtype=np.int32),
            sampling=sampling,
            max_new_tokens=min(limits.max_new_tokens, limits.max_sequence_length - len(record.tokens)),
            seed=key.seed(turn),
            stop_token_ids=limits.stop_token_ids,
            stop_strings=limits.stop_strings,
            deadline_seconds=limits.generation_seconds,
            conversation=str(key),
            routed_experts_from=record.num_routed,
        )
        completion = await self._generator.generate(request, lambda progress: record.note(progress.versions))
        record.seconds_generation += time.monotonic() - start
        tokens = completion.tokens.tolist()
        ended = tokens and tokens[-1] in limits.stop_token_ids
        text = self._tokenizer.decode(tokens[:-1] if ended else tokens)
        record.add_turn(completion, text)
        if completion.stop in (StopReason.ABORT, StopReason.ERROR):
            spent = f"{completion.seconds:.1f} s and {len(tokens)} tokens"
            problem = f"generation of turn {turn + 1}: ended with `{completion.stop}` after {spent}"
            raise ConversationFailed(problem)
        return Action(text, completion.tokens, completion.stop)

    async def _ask(self, record: Record, call: Coroutine[Any, Any, T], stage: str) -> T:
        """What the environment answers. Raises ConversationFailed when it fails or hangs."""
        start = time.monotonic()
        with self._environments.calling():
            outcome = await attempt(call, stage, self._limits.environment_seconds)
        record.seconds_environment += time.monotonic() - start
        if not isinstance(outcome.error, EnvironmentLost | TimeoutError):
            self._environments.answered()
        if outcome.value is None:
            failure = ConversationFailed(outcome.failure or f"{stage}: answered None")
            record.failure = failure if outcome.error is None else outcome.error
            raise failure
        return outcome.value
