"""From what datasets hold to sequences of tokens."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from .examples import Example, ExampleError, dialogue_example, steps_example
from .judged import Dialogue, Feedback, Messages, Pair, Steps
from .prompts import Prompts
from .tokenizer import Tokenizer

T = TypeVar("T")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Encoder:
    """Makes examples of at most `max_length` tokens. Raises ExampleError with the example's number."""

    tokenizer: Tokenizer
    prompts: Prompts
    max_length: int

    def dialogues(
        self, dialogues: Iterable[Dialogue], train_on: Literal["completion", "all"]
    ) -> list[Example]:
        """A sequence of each, with every turn of the assistant learnt, or all tokens."""
        return _each(dialogues, lambda d: self._example(d.opening, d.exchange, train_on))

    def pairs(self, pairs: Iterable[Pair]) -> list[tuple[Example, Example]]:
        """Chosen and rejected."""
        return _each(
            pairs,
            lambda p: (self._example(p.opening, p.chosen), self._example(p.opening, p.rejected)),
        )

    def feedback(self, feedback: Iterable[Feedback]) -> list[Example]:
        """The judged answers."""
        return _each(feedback, lambda f: self._example(f.opening, f.completion))

    def steps(self, answers: Iterable[Steps]) -> list[Example]:
        """Answers labelled at the end of each step."""
        return _each(
            answers,
            lambda a: steps_example(
                a.opening, a.steps, a.labels, self.tokenizer, self.prompts, self.max_length
            ),
        )

    def _example(
        self, opening: Messages, exchange: Messages, train_on: Literal["completion", "all"] = "completion"
    ) -> Example:
        return dialogue_example(opening, exchange, self.tokenizer, self.prompts, self.max_length, train_on)


def _each(found: Iterable[T], made_of: Callable[[T], Made]) -> list[Made]:
    made = []
    for number, one in enumerate(found):
        try:
            made.append(made_of(one))
        except ExampleError as error:
            raise ExampleError(f"example {number}: {error}") from error
    return made
