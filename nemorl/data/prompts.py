"""A conversation's tokens, turn by turn: what was sampled stays as it was sampled.

A chat template renders complete conversations. Here it is used only for what surrounds a turn: a
placeholder takes the turn's place, and the text after it is what the template adds: its end of the turn,
the observation, and the opening of the next turn.
"""

from collections.abc import Sequence
from typing import Protocol

from nemorl.trajectories import Message

from .tokenizer import PLACEHOLDER, Tokenizer, TokenizerError


class TemplateError(TokenizerError):
    """A chat template that cannot be applied turn by turn; the message names the template."""


class Prompts(Protocol):
    """Renders messages as the tokens between the policy's turns."""

    @property
    def end_token_id(self) -> int:
        """The token that should end a turn."""
        ...

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The tokens before the first turn."""
        ...

    def after_turn(
        self,
        history: Sequence[Message],
        turn: Message,
        observation: Sequence[Message],
        last_token: int | None,
    ) -> list[int]:
        """The tokens between a turn of the policy and its next: only these are encoded, never the turn.

        `history` precedes the turn; `last_token` is the last one sampled, None for an empty turn.
        """
        ...


class PlainPrompts:
    """Messages as plain text, joined: for models without a chat format."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def end_token_id(self) -> int:
        """The tokenizer's end token."""
        return self._tokenizer.eos_token_id

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The texts joined, with the model's start token."""
        return self._tokenizer.encode_document("".join(m.content for m in messages))

    def after_turn(
        self,
        history: Sequence[Message],
        turn: Message,
        observation: Sequence[Message],
        last_token: int | None,
    ) -> list[int]:
        """The observation's texts joined."""
        return self._tokenizer.encode("".join(m.content for m in observation))


class ChatPrompts:
    """Messages by the tokenizer's chat template, applied to one turn at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def end_token_id(self) -> int:
        """The token that the template puts after an assistant's message, else the tokenizer's end token."""
        template_end = self._tokenizer.template_end_token_id
        return self._tokenizer.eos_token_id if template_end is None else template_end

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The opening messages and the header of the policy's first turn."""
        return self._tokenizer.encode(self._tokenizer.render(messages, add_generation_prompt=True))

    def after_turn(
        self,
        history: Sequence[Message],
        turn: Message,
        observation: Sequence[Message],
        last_token: int | None,
    ) -> list[int]:
        """The template's end of the turn unless it was sampled, the observation, the header of the next turn.

        Raises TemplateError when the template does not leave the turns before as they were.
        """
        self._check_prefix(history, turn, observation)
        stand_in = Message("assistant", PLACEHOLDER)
        rendered = self._tokenizer.render([*history, stand_in, *observation], add_generation_prompt=True)
        if rendered.count(PLACEHOLDER) != 1:
            raise TemplateError(
                f"the chat template of {self._tokenizer.name} does not write an assistant's message exactly "
                "once, so a conversation of several turns cannot be kept token-exact"
            )
        tokens = self._tokenizer.encode(rendered.partition(PLACEHOLDER)[2])
        ends = self._tokenizer.end_token_ids
        # A model may end its turn with another end token than the template's; one end is enough either way.
        return tokens[1:] if last_token in ends and tokens[:1] and tokens[0] in ends else tokens

    def _check_prefix(
        self, history: Sequence[Message], turn: Message, observation: Sequence[Message]
    ) -> None:
        """The whole conversation, rendered again, begins with what the policy saw and then says what it said.

        White space is left out of the comparison of the turn: templates trim it, the kept tokens do not.
        """
        before = self._tokenizer.render(history, add_generation_prompt=True)
        after = self._tokenizer.render([*history, turn, *observation], add_generation_prompt=True)
        kept = after.startswith(before) and _without_space(after[len(before) :]).startswith(
            _without_space(turn.content)
        )
        if not kept:
            raise TemplateError(
                f"the chat template of {self._tokenizer.name} rewrites earlier turns (many drop a turn's "
                "reasoning when the next message comes), so the policy would be trained on a conversation "
                "it never had: give a template that keeps them in `policy.tokenizer.chat_template`"
            )


def prompts_of(tokenizer: Tokenizer, chat: bool) -> Prompts:
    """By the chat template where `data.chat` asks for it, else plain."""
    return ChatPrompts(tokenizer) if chat else PlainPrompts(tokenizer)


def _without_space(text: str) -> str:
    return "".join(text.split())
