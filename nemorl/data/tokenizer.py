"""The model's tokenizer and chat template, loaded without torch, and conversations as tokens turn by turn.

Sampled tokens stay. The chat template gives only what surrounds a turn: it renders the conversation with a
placeholder in the turn's place, and the text after that is what it adds.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.config.policy import PolicyConfig
from nemorl.errors import NemorlError
from nemorl.trajectories import Message

# Survives every template unchanged: no whitespace at its ends, no mark-up, no words of a chat format.
PLACEHOLDER = "nemorl-turn-placeholder"
Messages = Sequence[Message]
Objects = Sequence[Mapping[str, Any]]


class TokenizerError(NemorlError, ValueError):
    """A tokenizer or chat template that cannot be used; the message names the file or the template."""


class Tokenizer:
    """Text to token ids and back, and the chat template; any of `end_token_ids` ends a turn."""

    def __init__(self, backend: Any, name: str, end_token_ids: frozenset[int]) -> None:
        """`backend` is a transformers `PreTrainedTokenizerFast`; `name` says in errors where it came from."""
        self._backend, self.name = backend, name
        self.template_end_token_id = self._template_end() if self.chat_template else None
        self.end_token_ids = end_token_ids
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

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        plain = [{"role": m.role, "content": m.content} for m in messages]
        return self.render_chat(plain, None, add_generation_prompt)

    def render_chat(self, messages: Objects, tools: Objects | None, add_generation_prompt: bool) -> str:
        """The conversation as the template writes it. Raises TokenizerError with its complaint."""
        import jinja2

        if not self.chat_template:
            fix = "name one in `policy.tokenizer.chat_template`, or set `data.chat: false` for plain text"
            raise TokenizerError(f"the tokenizer {self.name} has no chat template: {fix}")
        try:
            options = {"tools": tools, "tokenize": False, "add_generation_prompt": add_generation_prompt}
            return str(self._backend.apply_chat_template(list(messages), **options))
        except jinja2.TemplateError as error:
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

    folder = policy.tokenizer.path or policy.model_path
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerError(f"{folder} holds no tokenizer.json")
    backend = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
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
    return Tokenizer(backend, str(folder), frozenset(ends))


class TemplateError(TokenizerError):
    """A chat template that cannot be applied turn by turn."""


class Prompts:
    """Renders messages as the tokens between the policy's turns: here as plain text, joined."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def end_token_id(self) -> int:
        return self._tokenizer.eos_token_id

    def open(self, messages: Messages) -> list[int]:
        return self._tokenizer.encode_document("".join(m.content for m in messages))

    def after_turn(
        self, history: Messages, turn: Message, observation: Messages, last_token: int | None
    ) -> list[int]:
        """Tokens between two turns of the policy; `last_token` was sampled last, None for an empty turn."""
        return self._tokenizer.encode("".join(m.content for m in observation))


class ChatPrompts(Prompts):
    """Messages by the tokenizer's chat template, applied to one turn at a time."""

    @property
    def end_token_id(self) -> int:
        """The token that the template puts after an assistant's message, else the tokenizer's end token."""
        template_end = self._tokenizer.template_end_token_id
        return self._tokenizer.eos_token_id if template_end is None else template_end

    def open(self, messages: Messages) -> list[int]:
        return self._tokenizer.encode(self._tokenizer.render(messages, add_generation_prompt=True))

    def after_turn(
        self, history: Messages, turn: Message, observation: Messages, last_token: int | None
    ) -> list[int]:
        """Raises TemplateError when the template does not leave the turns before as they were."""
        tokenizer, template = self._tokenizer, f"the chat template of {self._tokenizer.name}"
        # The complete conversation, rendered again, begins with what the policy saw and then says what it
        # said; but for white space, which templates trim and the kept tokens do not.
        before = tokenizer.render(history, add_generation_prompt=True)
        after = tokenizer.render([*history, turn, *observation], add_generation_prompt=True)
        said, kept = ("".join(text.split()) for text in (turn.content, after[len(before) :]))
        if not after.startswith(before) or not kept.startswith(said):
            problem = "rewrites earlier turns (many drop a turn's reasoning when the next message comes)"
            raise TemplateError(
                f"{template} {problem}, so the policy would be trained on a conversation it never had: give "
                "a template that keeps them in `policy.tokenizer.chat_template`"
            )
        replaced = [*history, Message("assistant", PLACEHOLDER), *observation]
        rendered = tokenizer.render(replaced, add_generation_prompt=True)
        if rendered.count(PLACEHOLDER) != 1:
            problem = f"{template} does not write an assistant's message exactly once"
            raise TemplateError(f"{problem}, so a conversation of several turns cannot be kept token-exact")
        tokens, ends = tokenizer.encode(rendered.partition(PLACEHOLDER)[2]), tokenizer.end_token_ids
        # A model may end its turn with another end token than the template's; one end is enough either way.
        return tokens[1:] if last_token in ends and tokens[:1] and tokens[0] in ends else tokens


def prompts_of(tokenizer: Tokenizer, chat: bool) -> Prompts:
    return ChatPrompts(tokenizer) if chat else Prompts(tokenizer)
