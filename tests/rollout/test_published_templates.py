"""Conversations with tools under the chat templates that families publish, as the package trl ships them.

What the policy was prompted with is compared with the template applied to the whole, and what trains with
what was sampled. Messages and turns are written here, in the spelling of each family, and not by our parser.
"""

import asyncio
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemorl.data.tokenizer import ChatPrompts, Tokenizer
from nemorl.generation.types import SamplingParams
from nemorl.rollout.episodes import EpisodeLoop
from nemorl.rollout.turn_loop import SampleKey, Sampler, TurnLimits, TurnLoop
from nemorl.trajectories import (
    Conversation,
    Episode,
    EpisodeEnvironment,
    Message,
    Model,
    Reply,
    Step,
    Task,
    ToolCall,
    ToolSchemas,
)
from tests.rollout.stand_ins import ScriptedEnvironment, ScriptedGenerator

if (_spec := importlib.util.find_spec("trl")) is None or _spec.origin is None:
    pytest.skip("trl, which has the templates, is not installed", allow_module_level=True)
TEMPLATES = Path(_spec.origin).parent / "chat_templates"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does.", "parameters": PARAMETERS}}
    for name in ("add", "stop")
]
MARK = re.compile(r"<[|｜][^<>|｜{}'\" ]+[|｜]>|\[/?[A-Z_]+\]")

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Said:
    """A turn of the policy."""

    content: str
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    malformed: bool = False  # a call at the end of the content that nothing can read
    is_ended: bool = True  # by its end token, and not by a stop string
    is_compact: bool = False  # JSON without spaces, unlike that of templates


@dataclass(frozen=True)
class Published:
    """How models of a template write."""

    spell: Callable[[Said], str]  # a turn without its end token
    end: str
    malformed: str
    reasons: str | None = None  # the field of messages for it; None: it is not drawn
    opens_reasoning: bool = False  # in each turn
    shows_tools: bool = True  # else calls are not drawn
    max_calls: int = 2
    with_calls: bool = True  # text next to calls
    end_of_calls: str = ""  # where it is another one


def _json(value: Any, said: Said | None = None) -> str:
    separators = (",", ":") if said is not None and said.is_compact else None
    return json.dumps(value, ensure_ascii=False, separators=separators)


def _hermes(said: Said) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(a)}}}\n</tool_call>' for name, a in said.calls
    ]
    return "\n".join([*([said.content] if said.content else []), *calls])


def _thinking(
    spell: Callable[[Said], str], opening: str = "<think>\n", closing: str = "\n</think>\n\n"
) -> Callable[[Said], str]:
    """With reasoning before the rest of a turn; `opening` is empty where the template has it."""

    def spelled(said: Said) -> str:
        if said.reasoning is None:
            return spell(said)
        return f"{opening}{said.reasoning}{closing}{spell(said)}"

    return spelled


def _in_tags(between: str) -> Callable[[Said], str]:
    def spelled(said: Said) -> str:
        calls = []
        for name, arguments in said.calls:
            texts = {key: v if isinstance(v, str) else _json(v, said) for key, v in arguments.items()}
            parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
            calls.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
        text = "\n".join(calls)
        return f"{said.content}{between if said.content and calls else ''}{text}"

    return spelled


def _llama(said: Said) -> str:
    for name, arguments in said.calls:
        return f'{{"name": "{name}", "parameters": {_json(arguments, said)}}}'
    return said.content


def _text(said: Said) -> str:
    return said.content


def _harmony(said: Said) -> str:
    thought = (
        ""
        if said.reasoning is None
        else f"<|channel|>analysis<|message|>{said.reasoning}<|end|><|start|>assistant"
    )
    for name, arguments in said.calls:
        return f"{thought} to=functions.{name}<|channel|>commentary json<|message|>{_json(arguments, said)}"
    return f"{thought}<|channel|>final<|message|>{said.content}"


def _pythonic(said: Said) -> str:
    def literal(value: Any) -> str:
        if isinstance(value, str):
            return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        return _json(value) if isinstance(value, list) else str(value)

    calls = [
        f"{name}({', '.join(f'{key}={literal(value)}' for key, value in arguments.items())})"
        for name, arguments in said.calls
    ]
    return said.content + (f"<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>" if calls else "")


def _tagged(between: str) -> Published:
    spell = _thinking(_in_tags(between), "")
    return Published(spell, CHATML, BROKEN_TAGS, "reasoning_content", opens_reasoning=True)


CHATML, EOT, END_OF_SENTENCE = "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>"
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>'
BROKEN_LIST = "<|tool_call_start|>[add(a=1, b=x)]<|tool_call_end|>"
BROKEN_JSON = '{"name": "add", "parameters": {"a": }}'
BROKEN_TAGS = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</tool_call>"
PUBLISHED = {
    "qwen2_5": Published(_hermes, CHATML, BROKEN),
    "qwen3": Published(_thinking(_hermes), CHATML, BROKEN, "reasoning_content"),
    "qwen3_instruct_2507": Published(_hermes, CHATML, BROKEN),
    "qwen3_5_think": _tagged("\n\n"),
    "qwen3_6": _tagged("\n\n"),
    "qwen3_8": _tagged("\n\n"),
    "nemotron_3_nano": _tagged("\n"),
    "llama3_1": Published(_llama, EOT, BROKEN_JSON, max_calls=1, with_calls=False),
    "llama3_2": Published(_llama, EOT, BROKEN_JSON, max_calls=1, with_calls=False),
    # Which show no tools.
    "deepseekv3": Published(
        _thinking(_text, ""), END_OF_SENTENCE, "", "content", opens_reasoning=True, shows_tools=False
    ),
    "deepseek_r1_distill": Published(
        _thinking(_text, ""), END_OF_SENTENCE, "", "content", opens_reasoning=True, shows_tools=False
    ),
    "gptoss": Published(
        _harmony, "<|return|>", "", "thinking", max_calls=1, with_calls=False, end_of_calls="<|call|>"
    ),
    "lfm2_v2": Published(_pythonic, CHATML, BROKEN_LIST),
    "lfm2_2_5": Published(
        _thinking(_pythonic, "<think>", "</think>"), CHATML, BROKEN_LIST, "thinking"
    ),
}  # fmt: skip


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """Bytes, and the marks of the template."""
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    marks = ["<|endoftext|>", *sorted(set(MARK.findall(template)) - {"<|endoftext|>"})]
    names = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=marks[0])
    fast.add_special_tokens({"additional_special_tokens": marks[1:]})
    fast.chat_template = template
    return Tokenizer(fast, name, frozenset({0}))


words = st.text(alphabet="abc xyz 012,.é", min_size=1, max_size=12).map(str.strip).filter(bool)
values = st.one_of(st.integers(-9, 99), st.lists(st.integers(0, 9), max_size=2), words)
calls = st.tuples(
    st.sampled_from(["add", "stop"]), st.dictionaries(st.sampled_from("ab"), values, max_size=2)
)


def turns(published: Published) -> st.SearchStrategy[list[Said]]:
    reasoning = st.none() if published.reasons is None else words
    if published.reasons is not None and not published.opens_reasoning:
        reasoning |= st.none()
    ended = st.sampled_from([True, True, True, False])
    kinds = [st.builds(Said, words, reasoning, is_ended=ended)]
    if published.shows_tools:
        called = st.lists(calls, min_size=1, max_size=published.max_calls).map(tuple)
        kinds.append(
            st.builds(
                Said,
                st.just("") | words if published.with_calls else st.just(""),
                reasoning,
                called,
                is_compact=st.booleans(),
            )
        )
    if published.malformed:
        kinds.append(
            st.builds(
                lambda text, thought: Said(text + published.malformed, thought, malformed=True),
                words if published.with_calls else st.just(""),
                reasoning,
            )
        )
    return st.lists(st.one_of(kinds), min_size=2, max_size=4)


class Answers(ScriptedEnvironment):
    """Results of calls, and a question after anything else."""

    def __init__(self, said: Sequence[Said], tools: ToolSchemas) -> None:
        super().__init__([], tools=tools)
        self._said = said
        self.read: list[tuple[ToolCall, ...]] = []
        self.refused: list[int] = []

    async def step(self, action: Any) -> Step:
        self.actions.append(action)
        number = len(self.actions) - 1
        said = self._said[number]
        self.read.append(action.tool_calls)
        self.refused.append(len(action.call_errors))
        return Step(observed(said, number), done=number == len(self._said) - 1)


class Agent(EpisodeEnvironment):
    """The same with a loop of its own."""

    def __init__(self, said: Sequence[Said], tools: ToolSchemas) -> None:
        self._said, self._tools = said, tools
        self.read: list[tuple[ToolCall, ...]] = []
        self.refused: list[int] = []

    async def run(self, task: Task, model: Model) -> Episode:
        messages = list(task.messages)
        for number, one in enumerate(self._said):
            answer = await model.chat(messages, self._tools)
            self.read.append(answer.tool_calls)
            self.refused.append(len(answer.call_errors))
            messages += [answer.message, *observed(one, number)]
        return Episode()


def observed(said: Said, number: int) -> tuple[Message, ...]:
    if not said.calls:
        return (Message("user", f"And {number}?"),)
    return tuple(
        Message("tool", f"result {number} {place}", tool_call_id=f"t{number:03d}{place:05d}", name=name)
        for place, (name, _) in enumerate(said.calls)
    )


def as_dict(published: Published, said: Said, number: int) -> dict[str, Any]:
    """The turn as transformers takes it."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning is not None:
        if published.reasons == "content":
            message["content"] = f"<think>\n{said.reasoning}\n</think>\n\n{said.content}"
        else:
            message[str(published.reasons)] = said.reasoning
    if said.calls:
        message["tool_calls"] = [
            {
                "id": f"t{number:03d}{place:05d}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments,
                },
            }
            for place, (name, arguments) in enumerate(said.calls)
        ]
    return message


def without_space(text: str) -> str:
    return "".join(text.split())


def check(name: str, shape: Callable[..., Answers | Agent], system: str | None, said: Sequence[Said]) -> None:
    published, tokenizer = PUBLISHED[name], tokenizer_of(name)
    opening = (*([Message("system", system)] if system else []), Message("user", "1+x?"))
    sampled = []
    for one in said:
        end = published.end_of_calls if one.calls and published.end_of_calls else published.end
        sampled.append(published.spell(one) + (end if one.is_ended else ""))
    generator, environment = (
        ScriptedGenerator([tokenizer.encode(text) for text in sampled]),
        shape(said, TOOLS if published.shows_tools else ()),
    )
    limits = TurnLimits(100_000, 10_000, tokenizer.end_token_ids, (), 10.0, 10.0)
    sampler = Sampler(generator, tokenizer, ChatPrompts(tokenizer), limits)

    async def run() -> list[Conversation]:
        loop = EpisodeLoop(sampler, ()) if isinstance(environment, Agent) else TurnLoop(sampler)
        try:
            return await loop.run(Task(0, opening), environment, SampleKey(1, 0, 0), SamplingParams())  # type: ignore[arg-type]
        finally:
            if isinstance(loop, EpisodeLoop):
                await loop.close()

    (conversation,) = asyncio.run(run())
    assert conversation.trajectory.error is None, conversation.trajectory.error

    assert [[call.name for call in of_turn] for of_turn in environment.read] == [
        [name for name, _ in one.calls] for one in said
    ]
    assert environment.refused == [int(one.malformed) for one in said]
    messages = [{"role": m.role, "content": m.content} for m in opening]
    wholes = []  # the template applied to all before a turn
    for number, one in enumerate(said):
        wholes.append(
            tokenizer._backend.apply_chat_template(
                messages,
                tools=TOOLS if published.shows_tools else None,
                tokenize=False,
                add_generation_prompt=True,
            )
        )
        messages.append(as_dict(published, one, number))
        messages += [
            {"role": m.role, "content": m.content}
            | ({"tool_call_id": m.tool_call_id, "name": m.name} if m.role == "tool" else {})
            for m in observed(one, number)
        ]
    prompts = [tokenizer.decode(request.prompt.tolist()) for request in generator.requests]
    sequences = (*conversation.earlier, conversation.trajectory)
    starts = {sum(len(one.turns) for one in sequences[:place]) for place in range(len(sequences))}
    is_exact = True  # of all since the branch began
    for number, (prompt, whole) in enumerate(zip(prompts, wholes, strict=True)):
        if number:
            said_before = wholes[number - 1] + sampled[number - 1]
            is_exact = number in starts or (is_exact and whole.startswith(said_before))
            is_kept = without_space(whole).startswith(without_space(said_before))
            assert not (is_kept and number in starts), f"turn {number} begins a branch without need"
        if is_exact:
            assert prompt == whole
        else:  # white space of turns stays as it was sampled
            assert without_space(prompt) == without_space(whole)
    trained = [token for one in sequences for token in one.tokens[one.loss_mask].tolist()]
    assert trained == [token for turn in generator.turns for token in turn]
    contexts = [one.tokens[: turn.start].tolist() for one in sequences for turn in one.turns]
    assert contexts == [request.prompt.tolist() for request in generator.requests]


@pytest.mark.parametrize("shape", [Answers, Agent])
@pytest.mark.parametrize("name", PUBLISHED)
def test_prompts_are_the_template_of_the_whole_and_every_token_trains_once(
    name: str, shape: Callable[..., Answers | Agent]
) -> None:
    @settings(max_examples=12, derandomize=True, deadline=None, database=None)
    @given(system=st.none() | words, said=turns(PUBLISHED[name]))
    def holds(system: str | None, said: list[Said]) -> None:
        check(name, shape, system, said)

    holds()


def test_reasoning_begins_where_the_prompt_has_opened_it() -> None:
    """DeepSeek's template opens it after a question, and not after results of tools."""
    tokenizer = tokenizer_of("deepseekv3")
    prompts = ChatPrompts(tokenizer)
    question, result = Message("user", "1+x?"), Message("tool", "3")
    after_question, after_result = prompts.open([question]), prompts.open([question, result])
    assert prompts.read("Hm.\n</think>\n\nIt is 3.", 0, after_question) == Reply("It is 3.", "Hm.")
    assert prompts.read("Hm.", 0, after_question) == Reply("", "Hm.")  # cut off
    assert prompts.read("It is 3.", 0, after_result) == Reply("It is 3.")
