"""One conversation between the policy and an environment, token-exact.

task ─reset▶ opening ─▶ tokens ─▶ [ generate ─▶ step ─▶ observation ─▶ tokens ]… ─▶ Trajectory
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from nemorl.config.environment import EpisodeLimits, TurnFlagConfig
from nemorl.data.tokenizer import Prompts, TemplateRewrites, Tokenizer, TokenizerError
from nemorl.generation.types import Completion, GenerationRequest, Generator, SamplingParams
from nemorl.rewards.scored import Service, attempt
from nemorl.trajectories import (
    Action,
    Conversation,
    Environment,
    EnvironmentLost,
    Int32Array,
    Message,
    Reply,
    Step,
    StopReason,
    Task,
    Turn,
    add_rewards,
    called,
    opening_problem,
    step_problem,
)

from .recording import TokenSequence

PAST_DEADLINE = "not finished within `algorithm.group_seconds`"  # the error of a trajectory
# Ended from outside, while nothing had failed.
_CUT_SHORT = frozenset({StopReason.ABORT, StopReason.DEADLINE})


@dataclass
class Part:
    """The conversation of one player of a sample, while it grows."""

    player: str = ""
    fork: int = 0  # of its sample, from 1 on; 0 of what was not forked
    opening: tuple[Message, ...] = ()
    exchange: list[Message] = field(default_factory=list)
    num_prompt_tokens: int = 0
    sequence: TokenSequence = field(default_factory=TokenSequence)
    earlier: list[TokenSequence] = field(default_factory=list)  # branches before it
    rewards: dict[str, float] = field(default_factory=dict)
    stop: StopReason = StopReason.ERROR  # until a turn ends in another way

    @property
    def sequences(self) -> list[TokenSequence]:
        return [*self.earlier, self.sequence]

    @property
    def turns(self) -> list[Turn]:
        """Of all sequences, in the order in which rewards and advantages of turns are."""
        return [turn for one in self.sequences for turn in one.turns]

    def set_rewards(self, rewards: dict[str, float]) -> None:
        """Of the whole, and none of single turns."""
        self.rewards = rewards
        for one in self.sequences:
            one.turns = [replace(turn, rewards={}) for turn in one.turns]


@dataclass
class Record(Part):
    """A sample while it grows. The conversations of an episode are in their parts."""

    seats: list[Part] = field(default_factory=list)  # players and their forks that have made a call
    # Also of the turn that has not ended.
    oldest_version: int | None = None  # of the weights that sampled any token
    num_unfinished: int = 0  # tokens of that turn
    seconds_generation: float = 0.0
    seconds_environment: float = 0.0
    seconds_before: tuple[float, float] = (0.0, 0.0)  # the same of the attempts before this one
    failure: BaseException | None = None  # of the environment
    truncated_by: str | None = None  # the limit that ended it
    columns: dict[str, Any] = field(default_factory=dict)  # of an episode, for rewards
    num_retries: int = 0  # attempts before this one, and what the environment did again

    def restart(self) -> None:
        """Begin again, after an attempt that failed."""
        fresh = Record(
            num_retries=self.num_retries + 1,
            seconds_before=self._seconds,
        )
        self.__dict__.update(fresh.__dict__)

    @property
    def _seconds(self) -> tuple[float, float]:
        """In the model and in the environment, of all attempts."""
        generation, environment = self.seconds_before
        return generation + self.seconds_generation, environment + self.seconds_environment

    def open(self, messages: tuple[Message, ...], tokens: list[int]) -> None:
        self.opening = messages
        self.num_prompt_tokens = len(tokens)
        self.sequence.add_given(tokens)

    def add_turn(self, completion: Completion, message: Message, flags: tuple[str, ...] = ()) -> None:
        """A turn as it was sampled, and as a message of the conversation."""
        self.sequence.add_turn(completion, flags=flags)
        self.note(completion.versions)
        self.num_unfinished = 0
        self.exchange.append(message)
        self.stop = completion.stop

    @property
    def tokens(self) -> list[int]:
        """Of the sequence that grows."""
        return self.sequence.tokens

    @property
    def parts(self) -> list[Part]:
        """All conversations; without an episode the only one."""
        return self.seats or [self]

    @property
    def num_sampled(self) -> int:
        sequences = [one for part in self.parts for one in part.sequences]
        return sum(sum(one.sampled) for one in sequences) + self.num_unfinished

    def note(self, versions: Int32Array) -> None:
        """Take the versions of tokens of a turn that has not ended."""
        known = () if self.oldest_version is None else (self.oldest_version,)
        self.oldest_version = min((*known, *versions.tolist()), default=None)
        self.num_unfinished += len(versions)

    def add_observation(self, messages: tuple[Message, ...], tokens: list[int]) -> None:
        self.exchange += messages
        self.sequence.add_given(tokens)

    def add_branch(self, messages: tuple[Message, ...], tokens: list[int]) -> None:
        """An observation with which all before is written again; the turns so far train as they were."""
        self.earlier.append(self.sequence)
        self.sequence = TokenSequence()
        self.num_prompt_tokens = len(tokens)
        self.add_observation(messages, tokens)

    def add_rewards(self, step: Step) -> None:
        """Rewards of the newest turn; those of one name add up over turns."""
        turns = self.sequence.turns
        turns[-1] = replace(turns[-1], rewards=dict(step.rewards))
        add_rewards(step.rewards, self.rewards)
        self.num_retries += step.num_retries

    def finish(self, group: int, task: int, error: str | None) -> list[Conversation]:
        """The conversations so far. After an error none trains or has rewards.

        The seconds are those of the sample, spread evenly.
        """
        failed, parts = error is not None, self.parts
        conversations = []
        for part in parts:
            # A failure may leave a branch in which nothing was sampled.
            sequences = [one for one in part.sequences if one.turns] or [part.sequence]
            *earlier, last = (
                one.trajectory(
                    group,
                    task,
                    rewards={} if failed else dict(part.rewards),
                    stop=StopReason.ERROR if failed and part.stop not in _CUT_SHORT else part.stop,
                    error=error,
                    seconds_generation=self._seconds[0] / len(parts),
                    seconds_environment=self._seconds[1] / len(parts),
                    player=part.player,
                    fork=part.fork,
                )
                for one in sequences
            )
            opening, exchange, columns = part.opening, tuple(part.exchange), dict(self.columns)
            prompt = min(part.num_prompt_tokens, last.num_tokens)
            conversations.append(Conversation(last, opening, exchange, prompt, tuple(earlier), columns))
        return conversations


log = logging.getLogger(__name__)
T = TypeVar("T")


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


@dataclass(frozen=True)
class Spent:
    """What an episode has used of its limits."""

    calls: int
    tokens: int  # sampled
    seconds: float  # in calls of the model


@dataclass(frozen=True)
class TurnLimits:
    max_sequence_length: int  # tokens, prompt included
    max_new_tokens: int  # of one turn
    stop_token_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    generation_seconds: float  # of one turn
    environment_seconds: float  # of one call
    episode: EpisodeLimits = EpisodeLimits()
    max_prompt_tokens: int | None = None  # of the opening

    def used_up(self, spent: Spent) -> str | None:
        """The limit of the episode that leaves nothing for another call."""
        episode = self.episode
        for name, used in (
            ("max_calls", spent.calls), ("max_tokens", spent.tokens), ("model_seconds", spent.seconds)
        ):  # fmt: skip
            limit = getattr(episode, name)
            if limit is not None and used >= limit:
                return f"env.limits.{name}"
        return None

    def request(
        self,
        key: SampleKey,
        number: int,
        prompt: Sequence[int] | Int32Array,
        sampling: SamplingParams,
        spent: Spent,
        num_routed: int,
        max_tokens: int | None = None,
        stop_strings: Sequence[str] = (),
    ) -> GenerationRequest:
        """The request of call `number` of a sample; there is room for it."""
        episode, room = self.episode, self.max_sequence_length - len(prompt)
        left = None if episode.max_tokens is None else episode.max_tokens - spent.tokens
        seconds = None if episode.model_seconds is None else episode.model_seconds - spent.seconds
        return GenerationRequest(
            id=f"{key}/{number}",
            prompt=np.array(prompt, dtype=np.int32),
            sampling=sampling,
            max_new_tokens=min(n for n in (self.max_new_tokens, room, left, max_tokens) if n is not None),
            seed=key.seed(number),
            stop_token_ids=self.stop_token_ids,
            stop_strings=(*self.stop_strings, *stop_strings),
            deadline_seconds=min(s for s in (self.generation_seconds, seconds) if s is not None),
            conversation=str(key),
            routed_experts_from=num_routed,
        )

    def ended(self, request: GenerationRequest, completion: Completion) -> Completion:
        """The completion; one that was aborted since the episode's time was over is cut off instead."""
        if completion.stop is StopReason.ABORT and request.deadline_seconds < self.generation_seconds:
            return replace(completion, stop=StopReason.LENGTH)
        return completion


class ConversationFailed(RuntimeError):
    """One conversation failed; the message names the stage."""


@dataclass(frozen=True)
class Sampler:
    """What the conversations of an environment share."""

    generator: Generator
    tokenizer: Tokenizer
    prompts: Prompts
    limits: TurnLimits
    service: Service = field(default_factory=lambda: Service("the environment"))  # for stall reports
    flags: Mapping[str, TurnFlagConfig] = field(default_factory=dict)  # of turns

    def text_of(self, completion: Completion) -> str:
        """What was sampled, without its end token."""
        tokens = completion.tokens.tolist()
        ended = tokens and tokens[-1] in self.limits.stop_token_ids
        return self.tokenizer.decode(tokens[:-1] if ended else tokens)

    def flags_of(self, reply: Reply) -> tuple[str, ...]:
        """Names of the flags of a turn that says this."""
        if reply.tool_calls:
            return ()
        said = reply.content, reply.reasoning or ""
        return tuple(name for name, flag in self.flags.items() if flag.fits(*said))


class TurnLoop:
    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self._limits = sampler, sampler.limits

    async def run(
        self,
        task: Task,
        environment: Environment,
        key: SampleKey,
        sampling: SamplingParams,
        record: Record | None = None,
        seconds: float | None = None,
    ) -> list[Conversation]:
        """Converse until the environment is done, the sequence is full or something fails.

        A failing or hanging environment, a template that refuses the conversation, an aborted turn and the
        end of `seconds` end this trajectory alone: its `error` names the stage and none of its tokens trains.
        The environment is closed in every case. An exception of the generator is raised. `record`, if given,
        is the conversation while it grows. Returned is one for each player and fork.
        """
        record, error = Record() if record is None else record, None
        try:
            async with asyncio.timeout(seconds) as limit:
                await self._converse(record, task, environment, key, sampling)
        except TimeoutError:
            if not limit.expired():
                raise
            for part in record.parts:
                part.stop = StopReason.DEADLINE
            error = PAST_DEADLINE
            log.warning("sample %s of task %d: %s", key, task.index, error)
        except (ConversationFailed, TokenizerError) as failure:
            error = str(failure)
            log.warning("sample %s of task %d: %s", key, task.index, error)
        finally:
            closed = await attempt(
                called(environment.close), "environment close", self._limits.environment_seconds
            )
        if closed.failure is not None:
            log.warning("sample %s of task %d: %s", key, task.index, closed.failure)
        return record.finish(key.group, task.index, error)

    async def _converse(
        self, record: Record, task: Task, environment: Environment, key: SampleKey, sampling: SamplingParams
    ) -> None:
        limit = self._limits.max_sequence_length
        given = self.sampler.prompts.given(task)
        opening = await self._ask(
            record, called(environment.reset, given, problem_of=opening_problem), "environment reset"
        )
        prompts = self.sampler.prompts.with_tools(getattr(environment, "tools", ()))
        record.open(opening, prompts.open(opening))
        if not record.tokens:
            raise ConversationFailed("prompt: no tokens, so there is nothing to condition the first one on")
        if (count := len(record.tokens)) >= limit:
            problem = f"prompt: {count} tokens leave no room in `policy.max_sequence_length` of {limit}"
            raise ConversationFailed(problem)
        longest = self._limits.max_prompt_tokens
        if longest is not None and count > longest:
            raise ConversationFailed(f"prompt: {count} tokens, more than `data.max_prompt_tokens`, {longest}")
        stop_strings = getattr(environment, "stop_strings", ())
        while True:
            action = await self._sample_turn(record, prompts, key, sampling, stop_strings)
            turn = len(record.turns)
            answer = called(environment.step, action, problem_of=step_problem)
            step = await self._ask(record, answer, f"environment step {turn}")
            record.add_rewards(step)
            if step.done or action.stop is StopReason.LENGTH:
                return
            record.truncated_by = self._limits.used_up(_spent(record))
            if record.truncated_by is not None:
                record.stop = StopReason.LENGTH
                return
            history = (*record.opening, *record.exchange[:-1])
            last_token = int(action.tokens[-1]) if len(action.tokens) else None
            try:
                tokens = prompts.after_turn(history, record.exchange[-1], step.messages, last_token)
                num_tokens, add = len(record.tokens) + len(tokens), record.add_observation
            except TemplateRewrites:
                tokens = prompts.open([*history, record.exchange[-1], *step.messages])
                num_tokens, add = len(tokens), record.add_branch
            if num_tokens >= limit:  # no room is left for a turn after it
                record.stop = StopReason.LENGTH
                return
            add(step.messages, tokens)
            stop_strings = step.stop_strings

    async def _sample_turn(
        self,
        record: Record,
        prompts: Prompts,
        key: SampleKey,
        sampling: SamplingParams,
        stop_strings: Sequence[str],
    ) -> Action:
        """One turn. Its tokens are kept as sampled; its text is only for the environment."""
        limits, start, turn = self._limits, time.monotonic(), len(record.turns)
        num_routed = record.sequence.num_routed
        request = limits.request(
            key, turn, record.tokens, sampling, _spent(record), num_routed, stop_strings=stop_strings
        )
        completion = await self.sampler.generator.generate(
            request, lambda progress: record.note(progress.versions)
        )
        completion = limits.ended(request, completion)
        record.seconds_generation += time.monotonic() - start
        text = self.sampler.text_of(completion)
        reply = prompts.read(text, turn, request.prompt.tolist())
        record.add_turn(completion, prompts.message(text, reply), self.sampler.flags_of(reply))
        refuse_broken(completion, turn)
        return Action(text, completion.tokens, completion.stop, reply)

    async def _ask(self, record: Record, call: Coroutine[Any, Any, T], stage: str) -> T:
        """What the environment answers. Raises ConversationFailed when it fails or hangs."""
        start = time.monotonic()
        with self.sampler.service.calling():
            outcome = await attempt(call, stage, self._seconds_left(record))
        record.seconds_environment += time.monotonic() - start
        if not isinstance(outcome.error, EnvironmentLost | TimeoutError):
            self.sampler.service.answered()
        if outcome.value is None:
            failure = ConversationFailed(outcome.failure or f"{stage}: answered None")
            record.failure = failure if outcome.error is None else outcome.error
            raise failure
        return outcome.value

    def _seconds_left(self, record: Record) -> float:
        """For the next call of the environment."""
        limit, total = self._limits.environment_seconds, self._limits.episode.environment_seconds
        return limit if total is None else max(0.0, min(limit, total - record.seconds_environment))


def _spent(record: Record) -> Spent:
    return Spent(len(record.turns), record.num_sampled, record.seconds_generation)


def refuse_broken(completion: Completion, turn: int) -> None:
    """Raise ConversationFailed for a turn that was cut short by an engine or its deadline."""
    if completion.stop in (StopReason.ABORT, StopReason.ERROR):
        spent = f"{completion.seconds:.1f} s and {len(completion.tokens)} tokens"
        problem = f"generation of turn {turn + 1}: ended with `{completion.stop}` after {spent}"
        raise ConversationFailed(problem)
