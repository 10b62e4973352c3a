"""Reasoning and tool calls in the text of a turn, as each family of models writes them.

    text ─parse▶ Reply(content, reasoning, tool_calls, call_errors)

The chat template writes them back. `parse` raises nothing, whatever a model samples: of a call that cannot
be read, an error says what is wrong with it.
"""

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from nemorl.trajectories import Reply, ToolCall

ID_LENGTH = 9  # of calls; templates of Mistral take no other, and letters and digits only
MAX_CALLS = 64  # of a turn, malformed ones included; what comes after them is content
_SPACE = re.compile(r"\s*")


class CallRefused(ValueError):
    """A call that cannot be read; the message is for the model."""


@dataclass(frozen=True)
class Found:
    """Where a text holds a call, read or refused."""

    start: int
    end: int
    call: tuple[str, dict[str, Any]] | CallRefused  # name and arguments


class ToolFormat(ABC):
    """How a family writes tool calls."""

    name: ClassVar[str]
    traits: ClassVar[tuple[tuple[str, ...], ...]]  # of its chat templates: all parts of one of these
    example: ClassVar[str]  # for a model whose call cannot be read
    # Calls are in the text from the first of these on; empty: anywhere in it.
    marks: ClassVar[tuple[str, ...]] = ("",)
    wrappers: ClassVar[tuple[str, ...]] = ()  # around calls; no content
    think: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    end_tokens: ClassVar[tuple[str, ...]] = ()  # that end a turn with calls, besides those of the model
    arguments_as_text: ClassVar[bool] = False  # in the messages that the template takes
    later_end: ClassVar[str] = ""  # of earlier turns, in place of the end token that was sampled
    splits_every_turn: ClassVar[bool] = False  # as its templates take no text with the marks of a turn

    def parse(
        self, text: str, id_prefix: str = "call", *, in_reasoning: bool = False, max_calls: int | None = None
    ) -> Reply:
        """Read a turn without its end token.

        `in_reasoning`: the prompt has opened the reasoning. Further calls than `max_calls` are errors. Calls
        that cannot be read stay in the content if there is no other.
        """
        text, reasoning = self._take_reasoning(text, in_reasoning)
        calls: list[ToolCall] = []
        errors: list[str] = []
        kept: list[str] = []
        position = 0
        for number, found in enumerate(islice(self._find(text), MAX_CALLS), start=1):
            kept.append(text[position : found.start])
            position = found.end
            if isinstance(found.call, CallRefused):
                errors.append(f"Tool call {number} cannot be read: {found.call}. Write {self.example}.")
            elif len(calls) == max_calls:
                errors.append(f"Tool call {number} was ignored: a turn has at most {max_calls}.")
            else:
                name, arguments = found.call
                call_id = f"{id_prefix}{len(calls):0{max(1, ID_LENGTH - len(id_prefix))}d}"
                calls.append(ToolCall(call_id, name, arguments))
        if calls:
            text = "".join([*kept, text[position:]])
            for wrapper in self.wrappers:
                text = text.replace(wrapper, "")
            text = text.strip()
        return Reply(self._content(text), reasoning, tuple(calls), tuple(errors))

    def _take_reasoning(self, text: str, in_reasoning: bool) -> tuple[str, str | None]:
        opening, closing = self.think
        before, opened, after = text.partition(opening)
        if opened and not before.strip():
            text = after
        elif closing not in text and not in_reasoning:
            return text, None
        reasoning, _, content = text.partition(closing)
        return content.lstrip("\n"), reasoning.strip()

    def _content(self, text: str) -> str:
        """What is said in a text without calls."""
        return text

    @abstractmethod
    def _find(self, text: str) -> Iterator[Found]:
        """The calls in a text, in order."""


def _read_json(text: str, start: int) -> tuple[Any, int]:
    """The value of JSON that begins here, and where it ends. Raises CallRefused."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"invalid JSON ({error})") from None


def _skip_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return start if found is None else found.end()


def _as_call(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call in JSON. Raises CallRefused."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallRefused("it is no JSON object with the `name` of a tool")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON, as in OpenAI's messages
        arguments, _ = _read_json(arguments, 0)
    if not isinstance(arguments, dict):
        raise CallRefused(f"the arguments of `{value['name']}` are no JSON object")
    return value["name"], arguments


def _found(start: int, end: int, value: Any) -> Found:
    try:
        return Found(start, end, _as_call(value))
    except CallRefused as refusal:
        return Found(start, end, refusal)


class Hermes(ToolFormat):
    """Hermes, Qwen2.5 and Qwen3: JSON in tags."""

    name = "hermes"
    traits = (("<tool_call>",),)
    example = '<tool_call>{"name": "…", "arguments": {…}}</tool_call>'
    marks = ("<tool_call>",)

    def _find(self, text: str) -> Iterator[Found]:
        end = 0
        while (start := text.find("<tool_call>", end)) >= 0:
            try:
                value, end = _read_json(text, _skip_space(text, start + len("<tool_call>")))
            except CallRefused as refusal:
                end = _end_of(text, "</tool_call>", start + 1)
                yield Found(start, end, refusal)
                continue
            closing = _skip_space(text, end)
            end = closing + len("</tool_call>") if text.startswith("</tool_call>", closing) else end
            yield _found(start, end, value)


def _end_of(text: str, mark: str, start: int) -> int:
    """One past the next mark, or the end of the text."""
    place = text.find(mark, start)
    return len(text) if place < 0 else place + len(mark)


class Qwen3Coder(ToolFormat):
    """Qwen3-Coder and later Qwen: parameters in tags of their own, with text as it is and JSON otherwise."""

    name = "qwen3_coder"
    traits = (("<tool_call>", "<function="),)
    example = "<tool_call><function=name><parameter=key>value</parameter></function></tool_call>"
    marks = ("<tool_call>",)
    _call = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
    _function = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)

    def _find(self, text: str) -> Iterator[Found]:
        for call in self._call.finditer(text):
            function = self._function.fullmatch(call[1].strip())
            if function is None:
                yield Found(*call.span(), CallRefused("there is no complete <function=…> in it"))
                continue
            parameters = dict(map(self._parameter, function[2].split("<parameter=")[1:]))
            yield Found(*call.span(), (function[1], parameters))

    @staticmethod
    def _parameter(text: str) -> tuple[str, Any]:
        key, _, value = text.rpartition("</parameter>")[0].partition(">")
        value = value.removeprefix("\n").removesuffix("\n")
        try:
            return key, json.loads(value)
        except (ValueError, RecursionError):
            return key, value


class Llama3(ToolFormat):
    """Llama 3: the whole turn is JSON, with `parameters`; one call after `<|python_tag|>`, or several."""

    name = "llama3"
    traits = (("<|start_header_id|>", "ipython"), ("<|python_tag|>",))
    example = '{"name": "…", "parameters": {…}} and nothing else'
    wrappers = ("<|python_tag|>",)
    end_tokens = ("<|eom_id|>",)

    def _find(self, text: str) -> Iterator[Found]:
        _, tagged, _ = text.partition(self.wrappers[0])
        start = _end_of(text, self.wrappers[0], 0) if tagged else 0
        start = _skip_space(text, start)
        # A JSON object alone may be an answer.
        is_call = tagged or re.match(r'\{\s*"(?:name|type)"\s*:', text[start:])
        while is_call and start < len(text):
            try:
                value, end = _read_json(text, start)
            except CallRefused as refusal:
                yield Found(start, len(text), refusal)
                return
            separator = re.compile(r"[\s;,]*").match(text, end)
            assert separator is not None  # it matches nothing, too
            yield _found(start, separator.end(), value)
            start = separator.end()


class Mistral(ToolFormat):
    """Mistral: a JSON list of calls, or, of later models, names with arguments."""

    name = "mistral"
    traits = (("[TOOL_CALLS]",),)
    example = '[TOOL_CALLS][{"name": "…", "arguments": {…}}] or [TOOL_CALLS]name[ARGS]{…}'
    marks = ("[TOOL_CALLS]",)
    think = ("[THINK]", "[/THINK]")
    _named = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def _find(self, text: str) -> Iterator[Found]:
        end = 0
        while (start := text.find("[TOOL_CALLS]", end)) >= 0:
            body = _skip_space(text, start + len("[TOOL_CALLS]"))
            named = self._named.match(text, body)
            try:
                value, end = _read_json(text, body if named is None else named.end())
            except CallRefused as refusal:
                end = len(text) if (place := text.find("[TOOL_CALLS]", body)) < 0 else place
                yield Found(start, end, refusal)
                continue
            if named is not None:
                yield _found(start, end, {"name": named[1], "arguments": value})
            elif isinstance(value, list) and value:
                for number, item in enumerate(value):  # the first has the text of all
                    yield _found(end if number else start, end, item)
            else:
                yield _found(start, end, value)


class DeepSeek(ToolFormat):
    """DeepSeek V3 and R1, with a kind and a block of JSON, and V3.1, with a name and JSON."""

    name = "deepseek"
    traits = (("<｜tool▁calls▁begin｜>",),)
    example = "<｜tool▁call▁begin｜>, the tool as shown before, and <｜tool▁call▁end｜>"
    marks = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    wrappers = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    arguments_as_text = True
    _call = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)\n?", re.DOTALL)
    _fenced = re.compile(r"\s*([^\n`]+)\n```(?:json)?\n(.*)\n```\s*", re.DOTALL)

    def _find(self, text: str) -> Iterator[Found]:
        for call in self._call.finditer(text):
            name, _, rest = call[1].partition("<｜tool▁sep｜>")
            if fenced := self._fenced.fullmatch(rest):
                name, rest = fenced[1], fenced[2]
            try:
                value, _ = _read_json(rest, _skip_space(rest, 0))
            except CallRefused as refusal:
                yield Found(call.start(), call.end(), refusal)
            else:
                yield _found(call.start(), call.end(), {"name": name.strip(), "arguments": value})


class Pythonic(ToolFormat):
    """Llama 4, LFM2, OLMo: the whole turn is a Python list of calls with keywords and literals."""

    name = "pythonic"
    traits = (("<|python_start|>",), ("<|tool_call_start|>",))
    example = '[name(key="value", number=1)] and nothing else'
    wrappers = ("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>")  # in pairs
    _begins = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")

    def _find(self, text: str) -> Iterator[Found]:
        opening = next((mark for mark in self.wrappers[::2] if mark in text), "")
        closing = next((mark for mark in self.wrappers[1::2] if mark in text), "")
        start = text.index(opening) + len(opening)
        end = text.index(closing, start) if closing and closing in text[start:] else len(text)
        listed = text[start:end].strip()
        if not self._begins.match(listed) or not (opening or listed.endswith("]")):
            return
        try:
            tree = ast.parse(listed, mode="eval").body
            calls = [self._call(node) for node in tree.elts] if isinstance(tree, ast.List) else []
        except CallRefused as refusal:
            yield Found(start, end, refusal)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # also of brackets nested too deep
            yield Found(start, end, CallRefused("it is no Python list of calls with literals"))
        else:
            for number, call in enumerate(calls):  # the first has the text of all
                yield Found(end if number else start, end, call)

    @staticmethod
    def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
        if not isinstance(node, ast.Call) or node.args or not all(k.arg for k in node.keywords):
            raise CallRefused("an entry of the list is no call with keyword arguments")
        return ast.unparse(node.func), {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}


class Harmony(ToolFormat):
    """gpt-oss: a turn is messages in channels; those to `functions.…` are calls."""

    name = "harmony"
    traits = (("<|channel|>", "<|message|>"),)
    example = "<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>"
    end_tokens = ("<|call|>",)
    later_end = "<|end|>"
    splits_every_turn = True
    _end = re.compile(r"<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>)|\Z")
    _recipient = re.compile(r"\bto=([^\s<]+)")

    def _messages(self, text: str) -> Iterator[tuple[slice, str, str]]:
        """Where each message is, its header and its body."""
        start = 0
        while (middle := text.find("<|message|>", start)) >= 0:
            body = middle + len("<|message|>")
            end = self._end.search(text, body)
            assert end is not None  # it matches the end of the text, too
            yield slice(start, end.end()), text[start:middle], text[body : end.start()]
            start = end.end()

    def _take_reasoning(self, text: str, in_reasoning: bool) -> tuple[str, str | None]:
        kept, reasoning = "", []
        for place, header, body in self._messages(text):
            if "<|channel|>analysis" in header and not self._recipient.search(header):
                reasoning.append(body)
            else:
                kept += text[place]
        return (kept, "\n".join(reasoning)) if reasoning else (text, None)

    def _find(self, text: str) -> Iterator[Found]:
        for place, header, body in self._messages(text):
            recipient = self._recipient.search(header)
            if recipient is None or recipient[1] in ("user", "assistant"):
                continue
            try:
                value, _ = _read_json(body, _skip_space(body, 0))
            except CallRefused as refusal:
                yield Found(place.start, place.stop, refusal)
            else:
                call = {"name": recipient[1].removeprefix("functions."), "arguments": value}
                yield _found(place.start, place.stop, call)

    def _content(self, text: str) -> str:
        messages = [body for _, _, body in self._messages(text)]
        return "\n".join(messages) if messages else text


# In the order in which they are looked for: what has several marks comes first.
FORMATS: dict[str, ToolFormat] = {
    one.name: one for one in (Harmony(), Mistral(), DeepSeek(), Pythonic(), Qwen3Coder(), Hermes(), Llama3())
}


def format_of(chat_template: str) -> ToolFormat | None:
    """The format in which a chat template writes calls; None of a template that writes none, or others."""
    if "<arg_key>" in chat_template:  # GLM: tags of Hermes around something else
        return None
    for one in FORMATS.values():
        if any(all(part in chat_template for part in parts) for parts in one.traits):
            return one
    return None
