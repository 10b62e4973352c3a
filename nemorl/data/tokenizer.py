"""The model's tokenizer and chat template, loaded without torch, and conversations as tokens turn by turn.

Sampled tokens stay. The chat template gives only what surrounds a turn: it renders the conversation with a
placeholder in the turn's place, and the text after that is what it adds.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

from nemorl.config.policy import PolicyConfig
from nemorl.errors import NemorlError
from nemorl.trajectories import Message, Reply, Task, ToolCall, ToolSchemas

from .tool_calls import FORMATS, ToolFormat, format_of

# To see whether a template offers tools.
EXAMPLE_TOOLS: ToolSchemas = (
    {
        "type": "function",
        "function": {
            "name": "nemorl_example",
            "description": "An example.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)
# Survives every template unchanged: no whitespace at its ends, no mark-up, no words of a chat format.
PLACEHOLDER = "nemorl-turn-placeholder"
_OPENING_TOKENS = 16  # of a prompt's end, which hold the opening of reasoning
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of SentencePiece, of a byte that no other token has


def _characters_of_bytes() -> Iterator[tuple[str, int]]:
    """The characters by which byte-level vocabularies (GPT-2's) write bytes, with the bytes."""
    further = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            yield chr(byte), byte
        else:
            yield chr(further), byte
            further += 1


_BYTES = dict(_characters_of_bytes())
Messages = Sequence[Message]
Objects = Sequence[Mapping[str, Any]]


class TokenizerError(NemorlError, ValueError):
    """A tokenizer or chat template that cannot be used; the message names the file or the template."""


class Tokenizer:
    """Text to token ids and back, and the chat template; any of `end_token_ids` ends a turn."""

    def __init__(
        self,
        backend: Any,
        name: str,
        end_token_ids: frozenset[int],
        tool_format: ToolFormat | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`backend` is a transformers `PreTrainedTokenizerFast`; `name` says in errors where it came from.

        `tool_format` is that of the chat template where it is not given.
        """
        self._backend, self.name = backend, name
        self._template_arguments = dict(template_arguments or {})
        self.tool_format = format_of(self.chat_template) if tool_format is None else tool_format
        self.template_end_token_id = self._template_end() if self.chat_template else None
        of_calls = () if self.tool_format is None else self.tool_format.end_tokens
        added = backend.get_added_vocab()
        self.end_token_ids = end_token_ids | {added[token] for token in of_calls if token in added}
        if self.template_end_token_id is not None:
            self.end_token_ids |= {self.template_end_token_id}

    @property
    def chat_template(self) -> str:
        return str(self._backend.chat_template or "")

    @property
    def eos_token_id(self) -> int:
        """The token that ends a plain text. Raises TokenizerError when there is none."""
        if self._backend.eos_token_id is None:
            raise TokenizerError(f"the tokenizer {self.name} names no end token (`eos_token`)")
        return int(self._backend.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, or TokenizerError; special tokens only where the text spells them."""
        return self._encode(text, add_special_tokens=False)

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a text, and of each the number of characters up to its end."""
        encoded = self._backend(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]

    def encode_document(self, text: str) -> list[int]:
        """Encode a text that opens a sequence: with the start token if the model has one."""
        tokens = self._encode(text, add_special_tokens=True)
        return tokens[:-1] if tokens and tokens[-1] in self.end_token_ids else tokens

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:  # tokenizers raises no narrower class
            raise TokenizerError(f"the tokenizer {self.name} cannot encode the text: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        exact = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._backend.decode(tokens, **exact))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """What each token of the vocabulary writes, in UTF-8; a part of a character has some of its bytes.

        Special tokens write their names. Ids without a token have no bytes.
        """
        of_bytes = "ByteLevel" in json.dumps(json.loads(self._backend.backend_tokenizer.to_str())["decoder"])
        added = {token.content for token in self._backend.added_tokens_decoder.values()}
        written = [b""] * len(self)
        for token, number in self._backend.get_vocab().items():
            if number >= len(written):
                continue
            if token in added:
                written[number] = token.encode()
            elif of_bytes:
                written[number] = bytes(_BYTES[character] for character in token)
            elif byte := _BYTE_TOKEN.fullmatch(token):
                written[number] = bytes([int(byte[1], 16)])
            else:
                written[number] = token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        return written

    def __len__(self) -> int:
        """The size of the vocabulary, with special tokens."""
        return len(self._backend)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(
            number for number, token in self._backend.added_tokens_decoder.items() if token.special
        )

    def render(
        self, messages: Messages, add_generation_prompt: bool, tools: ToolSchemas | None = None
    ) -> str:
        plain = [self._for_template(message) for message in messages]
        return self.render_chat(plain, tools or None, add_generation_prompt)

    def _for_template(self, message: Message) -> dict[str, Any]:
        """The message with the names that this template uses."""
        plain = message.as_dict()
        if (reasoning := plain.pop("reasoning_content", None)) is not None:
            if "reasoning_content" in self.chat_template:
                plain["reasoning_content"] = reasoning
            elif ".thinking" in self.chat_template:
                plain["thinking"] = reasoning
            elif self.tool_format is not None:  # it is text to this template
                opening, closing = self.tool_format.think
                plain["content"] = f"{opening}\n{reasoning}\n{closing}\n\n{message.content}"
        if self.tool_format is not None and self.tool_format.arguments_as_text:
            for call in plain.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return plain

    @cached_property
    def max_calls(self) -> int | None:
        """Tool calls of a turn that the template writes: 0 if it writes none, None for any number."""
        calls = [ToolCall(f"call0000{n}", f"{PLACEHOLDER}-{n}", {}) for n in (0, 1)]
        for number, most in ((2, None), (1, 1)):
            results = [Message("tool", "x", tool_call_id=call.id, name=call.name) for call in calls[:number]]
            turn = Message("assistant", "", tuple(calls[:number]))
            try:
                text = self.render([Message("user", "x"), turn, *results], False)
            except TokenizerError:
                continue
            if all(call.name in text for call in calls[:number]):
                return most
        return 0

    def opens_reasoning(self, prompt: str | Sequence[int]) -> bool:
        """True if the template has begun the reasoning of the turn after this prompt, text or tokens."""
        text = prompt if isinstance(prompt, str) else self.decode([*map(int, prompt[-_OPENING_TOKENS:])])
        return text.rstrip().endswith("<think>" if self.tool_format is None else self.tool_format.think[0])

    def render_chat(self, messages: Objects, tools: Objects | None, add_generation_prompt: bool) -> str:
        """The conversation as the template writes it. Raises TokenizerError with its complaint."""
        import jinja2

        if not self.chat_template:
            fix = "name one in `policy.tokenizer.chat_template`, or set `data.chat: false` for plain text"
            raise TokenizerError(f"the tokenizer {self.name} has no chat template: {fix}")
        try:
            options = {"tools": tools, "tokenize": False, "add_generation_prompt": add_generation_prompt}
            options |= self._template_arguments
            return str(self._backend.apply_chat_template(list(messages), **options))
        except (jinja2.TemplateError, TypeError) as error:  # a type that the template does not expect
            problem = f"refuses a conversation of {', '.join(m['role'] for m in messages)}"
            raise TokenizerError(f"the chat template of {self.name} {problem}: {error}") from error

    def _template_end(self) -> int | None:
        """The special token right after an assistant's message, if there is one."""
        turn = (Message("user", "x"), Message("assistant", PLACEHOLDER))
        rest = self.encode(self.render(turn, add_generation_prompt=False).rpartition(PLACEHOLDER)[2])
        return rest[0] if rest and rest[0] in self._backend.added_tokens_decoder else None


def load_tokenizer(policy: PolicyConfig) -> Tokenizer:
    """The tokenizer of `policy`. Raises TokenizerError for a missing or unreadable file."""
    # Not AutoTokenizer: its import takes two seconds more, and it may rebuild what tokenizer.json says.
    from transformers import PreTrainedTokenizerFast

    folder = policy.tokenizer_folder
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerError(f"{folder} holds no tokenizer.json")
    try:
        backend = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise TokenizerError(f"{folder} holds files that transformers cannot read: {error!r}") from error
    if policy.tokenizer.chat_template is not None:
        try:
            backend.chat_template = policy.tokenizer.chat_template.read_text(encoding="utf-8")
        except OSError as error:
            raise TokenizerError(f"cannot read the chat template: {error}") from error
    ends = set() if backend.eos_token_id is None else {backend.eos_token_id}
    for file in (policy.model_path / "config.json", policy.model_path / "generation_config.json"):
        if file.is_file():
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")  # one or several
            ends.update([value] if isinstance(value, int) else value or [])
    own_format = FORMATS.get(policy.tokenizer.tool_format)
    return Tokenizer(backend, str(folder), frozenset(ends), own_format, policy.tokenizer.template_arguments)


class TemplateError(TokenizerError):
    """A chat template that cannot be applied turn by turn."""


class TemplateRewrites(TemplateError):
    """What the template writes of earlier turns is not what was sampled."""


class Prompts:
    """Renders messages as the tokens between the policy's turns: here as plain text, joined."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def given(self, task: Task) -> Task:
        """The task as an environment receives it. Raises TokenizerError."""
        return task

    def with_tools(self, tools: ToolSchemas) -> Self:
        """The prompts of a conversation with these tools. Raises TemplateError if they cannot be offered."""
        if tools:
            raise TemplateError("there are tools, which plain text cannot offer: set `data.chat: true`")
        return self

    @property
    def end_token_id(self) -> int:
        return self._tokenizer.eos_token_id

    def read(self, text: str, turn: int, prompt: str | Sequence[int] = "") -> Reply:
        """What a turn of the policy says; `turn` is its number in the conversation.

        `prompt` is what it follows, which may have begun its reasoning.
        """
        return Reply(text)

    def message(self, text: str, reply: Reply) -> Message:
        """The turn as a message of the conversation."""
        return Message("assistant", text)

    def open(self, messages: Messages) -> list[int]:
        return self._tokenizer.encode_document("".join(m.content for m in messages))

    def turn(self, history: Messages, message: Message, observation: Messages) -> list[int]:
        """Tokens of a turn that was not sampled, to its end token; `observation` is what follows it.

        Raises TemplateError for what cannot be written.
        """
        if message.tool_calls or message.reasoning is not None:
            raise TemplateError("plain text has no tool calls and no reasoning: set `data.chat: true`")
        return [*self._tokenizer.encode(message.content), self.end_token_id]

    def after_turn(
        self, history: Messages, turn: Message, observation: Messages, last_token: int | None
    ) -> list[int]:
        """Tokens between two turns of the policy; `last_token` was sampled last, None for an empty turn."""
        return self._tokenizer.encode("".join(m.content for m in observation))


class ChatPrompts(Prompts):
    """Messages by the tokenizer's chat template, applied to one turn at a time."""

    def __init__(self, tokenizer: Tokenizer, tools: ToolSchemas = ()) -> None:
        super().__init__(tokenizer)
        self._tools = tools

    def with_tools(self, tools: ToolSchemas) -> Self:
        """Raises TemplateError if the model's way to call tools is unknown, or its template offers none."""
        if not tools:
            return self
        tokenizer = self._tokenizer
        if tokenizer.tool_format is None:
            fix = "set policy.tokenizer.tool_format, or another chat_template"
            raise TemplateError(
                f"the chat template of {tokenizer.name} shows no known format of tool calls: {fix}"
            )
        name = str(tools[0]["function"]["name"])
        if name not in tokenizer.render([Message("user", "x")], add_generation_prompt=True, tools=tools):
            fix = "set another one in policy.tokenizer.chat_template"
            raise TemplateError(
                f"the chat template of {tokenizer.name} does not show tools to the model: {fix}"
            )
        return type(self)(tokenizer, tools)

    def read(self, text: str, turn: int, prompt: str | Sequence[int] = "") -> Reply:
        tokenizer = self._tokenizer
        if tokenizer.tool_format is None:
            return Reply(text)
        return tokenizer.tool_format.parse(
            text,
            f"t{turn:03d}",
            in_reasoning=tokenizer.opens_reasoning(prompt),
            max_calls=tokenizer.max_calls or None,
        )

    def message(self, text: str, reply: Reply) -> Message:
        """The text as sampled, or, with tools and for templates that require it, its parts."""
        one = self._tokenizer.tool_format
        splits = self._tools or (one is not None and one.splits_every_turn)
        if not splits or self._tokenizer.max_calls == 0:  # it would lose the calls
            return Message("assistant", text)
        return Message("assistant", reply.content, reply.tool_calls, reply.reasoning)

    def _render(self, messages: Messages) -> str:
        return self._tokenizer.render(messages, add_generation_prompt=True, tools=self._tools)

    @property
    def end_token_id(self) -> int:
        """The token that the template puts after an assistant's message, else the tokenizer's end token."""
        template_end = self._tokenizer.template_end_token_id
        return self._tokenizer.eos_token_id if template_end is None else template_end

    def open(self, messages: Messages) -> list[int]:
        return self._tokenizer.encode(self._render(messages))

    def turn(self, history: Messages, message: Message, observation: Messages) -> list[int]:
        """The content as it is; a turn with calls or reasoning as the template writes it."""
        if not self._has_parts(message):
            return super().turn(history, message, observation)
        tokenizer = self._tokenizer
        before, after = self._render(history), self._render([*history, message, *observation])
        tail = self._tail(history, message, observation)
        written = after[len(before) : len(after) - len(tail)]
        if not (after.startswith(before) and after.endswith(tail) and self._keeps(message, before, written)):
            raise TemplateRewrites(
                f"the chat template of {tokenizer.name} drops or changes tool calls or reasoning of a turn: "
                "give one that writes them in `policy.tokenizer.chat_template`"
            )
        end = next((token for token in tokenizer.encode(tail)[:1] if token in tokenizer.end_token_ids), None)
        return [*tokenizer.encode(written), self.end_token_id if end is None else end]

    def after_turn(
        self, history: Messages, turn: Message, observation: Messages, last_token: int | None
    ) -> list[int]:
        """Raises TemplateRewrites when the template does not leave the turns before as they were."""
        tokenizer, template = self._tokenizer, f"the chat template of {self._tokenizer.name}"
        before, after = self._render(history), self._render([*history, turn, *observation])
        tail = self._tail(history, turn, observation)
        tokens, ends = tokenizer.encode(tail), tokenizer.end_token_ids
        written = after[len(before) : len(after) - len(tail)]
        is_kept = after.startswith(before) and after.endswith(tail) and self._keeps(turn, before, written)
        # A turn that ended by one token is written with another one once others follow.
        later_end = "" if tokenizer.tool_format is None else tokenizer.tool_format.later_end
        if not is_kept or (later_end and tail.startswith(later_end) and last_token in ends):
            problem = "rewrites earlier turns (many drop a turn's reasoning when the next message comes)"
            raise TemplateRewrites(
                f"{template} {problem}, so the policy would be trained on a conversation it never had: give "
                "a template that keeps them in `policy.tokenizer.chat_template`"
            )
        # A model may end its turn with another end token than the template's; one end is enough either way.
        return tokens[1:] if last_token in ends and tokens[:1] and tokens[0] in ends else tokens

    def _tail(self, history: Messages, turn: Message, observation: Messages) -> str:
        """What the template writes after what the turn says, from its end token on."""
        template = f"the chat template of {self._tokenizer.name}"
        marked = replace(turn, content=PLACEHOLDER)
        if turn.tool_calls:
            *calls, last = turn.tool_calls
            marked = replace(turn, tool_calls=(*calls, replace(last, arguments={PLACEHOLDER: 0})))
        _, found, tail = self._render([*history, marked, *observation]).partition(PLACEHOLDER)
        if not found or PLACEHOLDER in tail:
            problem = f"{template} does not write an assistant's message exactly once"
            raise TemplateError(f"{problem}, so a conversation of several turns cannot be kept token-exact")
        if not turn.tool_calls:
            return tail
        ends = [
            place
            for end in self._tokenizer.end_token_ids
            if (place := tail.find(self._tokenizer.decode([end]))) >= 0
        ]
        if not ends:
            raise TemplateError(
                f"{template} writes no end token after tool calls, so the end of a turn is unknown"
            )
        return tail[min(ends) :]

    def _has_parts(self, turn: Message) -> bool:
        """True if the template writes more of a turn than its content."""
        one = self._tokenizer.tool_format
        return bool(turn.tool_calls) or turn.reasoning is not None or bool(one and one.splits_every_turn)

    def _keeps(self, turn: Message, before: str, written: str) -> bool:
        """True if the template writes what the turn says, but for white space and the spelling of calls."""
        # Templates trim white space, which the kept tokens do not.
        if not self._has_parts(turn):
            return "".join(turn.content.split()) == "".join(written.split())
        reply = self.read(written, 0, before)
        said, kept = ((one.content.strip(), (one.reasoning or "").strip()) for one in (turn, reply))
        calls = [[(call.name, call.arguments) for call in one.tool_calls] for one in (turn, reply)]
        return said == kept and calls[0] == calls[1]


class TextPrompts(Prompts):
    """One text that the environment continues, the marks of the chat template included."""

    def __init__(self, tokenizer: Tokenizer, chat: bool) -> None:
        """`chat`: the template writes the text of the task."""
        super().__init__(tokenizer)
        self._chat = chat

    def given(self, task: Task) -> Task:
        """With one message, which is the text that the policy receives."""
        if self._chat:
            text = self._tokenizer.render(task.messages, add_generation_prompt=True)
        else:
            text = "".join(m.content for m in task.messages)
        return replace(task, messages=(Message("user", text),))

    def open(self, messages: Messages) -> list[int]:
        """Special tokens are those that the text spells."""
        return self._tokenizer.encode("".join(m.content for m in messages))


def prompts_of(tokenizer: Tokenizer, chat: bool, *, as_text: bool = False) -> Prompts:
    """`as_text`: the environment writes what follows the prompt (`EnvBase.writes_text`)."""
    if as_text:
        return TextPrompts(tokenizer, chat)
    return ChatPrompts(tokenizer) if chat else Prompts(tokenizer)
