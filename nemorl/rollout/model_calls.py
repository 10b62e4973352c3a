"""The policy as an agent that owns its loop calls it: renders messages, samples within limits, and records.

messages ─▶ prompt tokens ─▶ generate ─▶ Recording ─▶ Answer

Where messages continue an earlier call, the prompt begins with the tokens of that call as they were sampled,
and the chat template gives only what comes after them. Where they do not, or the template rewrites what was
said, the prompt is rendered as a whole and begins another branch.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from nemorl.data.tokenizer import Prompts, TemplateError, Tokenizer
from nemorl.generation.types import (
    Completion,
    GenerationRequest,
    Progress,
    RequestRefused,
    SamplingParams,
)
from nemorl.trajectories import (
    Answer,
    EpisodeTruncated,
    Int32Array,
    Message,
    Reply,
    StopReason,
    ToolSchemas,
    add_rewards,
)

from .recording import Call, Recording
from .turn_loop import ConversationFailed, Part, Record, SampleKey, Sampler, Spent, refuse_broken

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class _Asked:
    """A call before it is answered."""

    number: int
    name: str  # of its answer, for rewards
    request: GenerationRequest
    parent: Call | None
    prompts: Prompts  # with the tools of the call
    tools: str  # these, as JSON
    stop: tuple[str, ...]  # that the agent has set
    history: tuple[Message, ...]
    said: "_Answered | None"  # the last answer in these messages

    @property
    def opening(self) -> tuple[Message, ...]:
        """The messages before the first answer of the conversation."""
        return self.history if self.said is None else self.said.asked.opening


@dataclass(frozen=True)
class _Answered:
    """A call in words."""

    asked: _Asked
    call: Call
    text: str  # without the end token
    reply: Reply
    message: Message

    def is_said_by(self, message: Message) -> bool:
        """True if an agent gives this answer back as `message`, which may lack its reasoning."""
        if message == Message("assistant", self.text):  # also one that was cut off in its reasoning
            return True
        read = self.asked.prompts.read(message.content, 0)
        if message.role != "assistant" or _words(message.reasoning or read.reasoning) not in (
            "",
            _words(self.reply.reasoning),
        ):
            return False
        calls = message.tool_calls or read.tool_calls
        given, own = ([(c.name, c.arguments) for c in some] for some in (calls, self.reply.tool_calls))
        said = self.reply.content
        # Endpoints leave out the stop strings of a request.
        ends = (place for stop in self.asked.stop if (place := said.find(stop)) >= 0)
        contents = {_words(said), _words(said[: min(ends, default=len(said))])}
        return given == own and _words(read.content) in contents

    def whole(self, tokenizer: Tokenizer) -> str:
        """The text of prompt and answer."""
        return tokenizer.decode(self.call.tokens.tolist())

    def spelled_as(self, message: Message) -> Message:
        """The answer as it was sampled, with the agent's ids of its tool calls, to which results refer."""
        calls = zip(self.message.tool_calls, message.tool_calls, strict=False)
        ids = tuple(replace(own, id=given.id) for own, given in calls)
        return replace(self.message, tool_calls=ids or self.message.tool_calls)


def _words(text: str | None) -> str:
    """The text without white space, which templates and clients trim."""
    return "".join((text or "").split())


class EpisodeAccount:
    """What the players of an episode share: its limits and what it has spent. Belongs to one event loop."""

    def __init__(self, sampler: Sampler, key: SampleKey, record: Record) -> None:
        self.sampler, self.key, self.record = sampler, key, record
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.is_closed = False
        self._num_calls = 0
        self._num_sampled = 0  # by calls that have ended
        self._num_running = 0
        self._since = time.monotonic()  # when the first of the running calls began, or the last one ended
        self._environment = ExitStack()  # entered while no call runs
        self._environment.enter_context(sampler.service.calling())

    @property
    def truncated_by(self) -> str | None:
        """The limit that has ended the episode."""
        return self.record.truncated_by

    @property
    def environment_seconds_left(self) -> float:
        """Until the environment has failed, if it makes no call before that."""
        limits = self.sampler.limits
        if self._num_running:
            return limits.environment_seconds
        waited, total = self._lap_seconds, limits.episode.environment_seconds
        if total is None:
            return limits.environment_seconds - waited
        return total - self.record.seconds_environment - waited

    @property
    def spent(self) -> Spent:
        running = self._lap_seconds if self._num_running else 0.0
        return Spent(self._num_calls, self.record.num_sampled, self.record.seconds_generation + running)

    def begin_call(self, num_prompt_tokens: int) -> int:
        """The number of a call that begins. Raises EpisodeTruncated if a limit leaves no room for it."""
        limits, record = self.sampler.limits, self.record
        if self.is_closed:
            raise EpisodeTruncated("the episode is over")
        if record.truncated_by is None:
            record.truncated_by = limits.used_up(self.spent)
        if record.truncated_by is None and num_prompt_tokens >= limits.max_sequence_length:
            record.truncated_by = "policy.max_sequence_length"
        if (limit := record.truncated_by) is not None:
            raise EpisodeTruncated(
                f"{limit} leaves no room for another call ({num_prompt_tokens} prompt tokens)"
            )
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return number

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, a call runs, and the time is the model's."""
        if self._num_running == 0:
            self._environment.close()
            self.sampler.service.answered()
            self.record.seconds_environment += self._lap()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0 and not self.is_closed:
                self.record.seconds_generation += self._lap()
                self._environment.enter_context(self.sampler.service.calling())

    def add(self, completion: Completion) -> None:
        """Count the tokens of a call that has ended."""
        self._num_sampled += len(completion.tokens)

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_result(error)

    def close(self) -> None:
        """The episode is over: what has not ended is not recorded, and further calls are refused."""
        if self.is_closed:
            return
        self.is_closed = True
        self._environment.close()
        if self._num_running:
            self.record.seconds_generation += self._lap()
        else:
            self.record.seconds_environment += self._lap()
        self.record.num_unfinished = max(0, self.record.num_unfinished - self._num_sampled)

    def _lap(self) -> float:
        since, self._since = self._since, time.monotonic()
        return self._since - since

    @property
    def _lap_seconds(self) -> float:
        return time.monotonic() - self._since


class ModelCalls:
    """The calls of one player of an episode, mostly the only one, or of a fork of it."""

    def __init__(
        self, account: EpisodeAccount, sampling: SamplingParams, origin: "ModelCalls | None" = None
    ) -> None:
        """`origin`: the calls that a fork continues, as far as they have ended."""
        self.account, self.sampling, self.recording = account, sampling, Recording()
        self.sampler = account.sampler
        self._asked: dict[str, _Asked] = {}  # by the id of the request
        self._answered: list[_Answered] = []  # those of the origin included
        if origin is not None:
            self.recording.calls += origin.recording.calls
            self._answered += origin._answered
        self._before = frozenset(self.recording.calls)  # the fork

    @property
    def has_called(self) -> bool:
        return len(self.recording.calls) > len(self._before)

    @property
    def _own(self) -> list[_Answered]:
        return [one for one in self._answered if one.call not in self._before]

    def ask(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> GenerationRequest:
        """The request for an answer to these messages. Raises EpisodeTruncated, TokenizerError."""
        prompts = self.sampler.prompts.with_tools(tools)
        listed, history = json.dumps(list(tools), sort_keys=True), tuple(messages)
        said: _Answered | None = None
        for place, message in enumerate(history):
            if message.role != "assistant":
                continue
            for one in self._answered:
                before = one.asked.tools == listed and one.asked.history == history[:place]
                if before and one.is_said_by(message):
                    said = one
                    history = (*history[:place], one.spelled_as(message), *history[place + 1 :])
        prompt = self._continued(said, prompts, history) if said is not None else None
        if prompt is None:
            prompt = np.array(prompts.open(history), np.int32)
        return self._ask(prompt, prompts, listed, history, said, max_tokens, stop)

    def ask_text(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None,
        stop: Sequence[str],
        name: str | None = None,
    ) -> GenerationRequest:
        """The request for a continuation of a text or of tokens. Raises EpisodeTruncated, TokenizerError."""
        tokenizer = self.sampler.tokenizer
        said, rest = None, prompt
        if isinstance(prompt, str):
            whole = [(one, one.whole(tokenizer)) for one in self._answered]
            begun = [(one, text) for one, text in whole if prompt.startswith(text)]
            said, text = max(begun, key=lambda pair: len(pair[0].call.tokens), default=(None, ""))
            rest = prompt[len(text) :]
        if said is not None:
            after = np.array(tokenizer.encode(str(rest)), np.int32)
            tokens = np.concatenate([said.call.tokens, after])
        elif isinstance(prompt, str):
            tokens = np.array(tokenizer.encode_document(prompt), np.int32)
        else:
            tokens, rest = np.array(prompt, np.int32), tokenizer.decode(prompt)
        history = () if said is None else (*said.asked.history, said.message)
        history = (*history, Message("user", str(rest)))
        return self._ask(tokens, Prompts(tokenizer), "", history, said, max_tokens, stop)

    async def generate(self, request: GenerationRequest, on_progress: OnProgress | None = None) -> Completion:
        """Sample and record what was asked for. Raises EpisodeTruncated, and what the generator raises."""
        asked, num_noted = self._asked.pop(request.id), 0

        def note(progress: Progress) -> None:
            nonlocal num_noted
            num_noted += len(progress.tokens)
            self.account.record.note(progress.versions)
            if on_progress is not None:
                on_progress(progress)

        try:
            with self.account.running():
                completion = await self.sampler.generator.generate(request, note)
        except RequestRefused:  # a prompt of the agent's
            raise
        except Exception as error:
            self.account.fail(error)
            raise
        if self.account.is_closed:
            raise EpisodeTruncated("the episode is over")
        completion = self.sampler.limits.ended(request, completion)
        self.account.record.note(completion.versions[num_noted:])
        try:
            refuse_broken(completion, asked.number)
        except ConversationFailed as error:
            self.account.fail(error)
            raise
        self.account.add(completion)
        text = self.sampler.text_of(completion)
        reply = asked.prompts.read(text, asked.number, request.prompt.tolist())
        flags = self.sampler.flags_of(reply)
        call = Call(asked.number, request.prompt, completion, asked.parent, flags)
        self.recording.add(call)
        message = asked.prompts.message(text, reply)
        self._answered.append(_Answered(asked, call, text, reply, message))
        return completion

    async def chat(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        """Sample one answer."""
        completion = await self.generate(self.ask(messages, tools, max_tokens=max_tokens, stop=stop))
        one = next(one for one in self._answered if one.call.completion is completion)
        name, tokens = one.asked.name, completion.tokens
        return Answer(one.text, tokens, completion.stop, one.reply, id=name, message=one.message)

    def _continued(
        self, said: _Answered, prompts: Prompts, history: tuple[Message, ...]
    ) -> Int32Array | None:
        """The prompt that begins with the tokens of an answer; None if the template rewrites it."""
        place, tokens = len(said.asked.history), said.call.tokens
        sampled = said.call.completion.tokens
        last_token = int(sampled[-1]) if len(sampled) else None
        try:
            after = prompts.after_turn(history[:place], history[place], history[place + 1 :], last_token)
        except TemplateError:
            return None
        return np.concatenate([tokens, np.array(after, np.int32)])

    def _ask(
        self,
        prompt: Int32Array,
        prompts: Prompts,
        tools: str,
        history: tuple[Message, ...],
        said: _Answered | None,
        max_tokens: int | None,
        stop: Sequence[str],
    ) -> GenerationRequest:
        account, limits = self.account, self.sampler.limits
        if not len(prompt):
            raise ValueError("the messages have no tokens, so there is nothing to condition the first one on")
        spent = account.spent
        number = account.begin_call(len(prompt))
        parent = self.recording.continued_by(prompt)
        num_routed = 0 if parent is None else parent.num_routed
        request = limits.request(
            account.key, number, prompt, self.sampling, spent, num_routed, max_tokens, stop
        )
        name = f"call-{number}"
        self._asked[request.id] = _Asked(
            number, name, request, parent, prompts, tools, tuple(stop), history, said
        )
        return request

    def name(self, request: GenerationRequest, name: str) -> None:
        """Name the answer to a request that is not sampled yet."""
        self._asked[request.id] = replace(self._asked[request.id], name=name)

    def has_answered(self, name: str) -> bool:
        return any(one.asked.name == name for one in self._own)

    def part(self, answer_rewards: Mapping[str, Mapping[str, float]], rewards: Mapping[str, float]) -> Part:
        """What was recorded, at least one call; `answer_rewards` are of answers by name."""
        numbers = {one.asked.name: one.asked.number for one in self._own}
        of_calls = {numbers[name]: dict(given) for name, given in answer_rewards.items()}
        add_rewards(rewards, of_calls.setdefault(self.recording.calls[-1].number, {}))
        *earlier, sequence = self.recording.sequences(of_calls, self._before)
        total: dict[str, float] = {}
        for given in of_calls.values():
            add_rewards(given, total)
        *_, path = self.recording.branches()
        (leaf,) = (one for one in self._answered if one.call is path[-1])
        opening = leaf.asked.opening
        return Part(
            opening=opening,
            exchange=[*leaf.asked.history[len(opening) :], leaf.message],
            num_prompt_tokens=len(path[0].prompt),
            sequence=sequence,
            earlier=earlier,
            rewards=total,
            stop=leaf.call.completion.stop if self.account.truncated_by is None else StopReason.LENGTH,
        )
