"""Examples to train on: an opening and what should, or should not, follow it, as one sequence of tokens.

Turns are joined exactly as in a rollout: each is encoded separately and closed by the end token, and the chat
template renders only what is between turns.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from nemorl.config.data import DataConfig
from nemorl.config.policy import PolicyConfig
from nemorl.errors import NemorlError
from nemorl.trajectories import BoolArray, Float32Array, Int32Array, Message, ToolSchemas

from .datasets import DatasetError, Dialogue, Feedback, Pair, Steps, Text, load_tasks, source_sizes
from .tokenizer import Prompts, Tokenizer, load_tokenizer, prompts_of

TrainOn = Literal["completion", "all"]


class ExampleError(NemorlError, ValueError):
    """Data that cannot be trained on."""


@dataclass(frozen=True)
class Example:
    tokens: Int32Array  # [T]
    loss_mask: BoolArray  # [T] True for tokens that are trained on
    labels: Float32Array | None = None  # [T] of steps: from 1, right, to -1, wrong, where the mask is True
    # [T] the chunk of text that each token is a part of, shared with a teacher of other tokens; -1 in none
    chunks: Int32Array | None = None
    teacher: int = 0  # the number of this teacher

    @property
    def marked_at_end(self) -> "Example":
        """The example with a mask of its last token only."""
        return Example(self.tokens, np.arange(self.num_tokens) == self.num_tokens - 1)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else self.num_tokens


@dataclass(frozen=True)
class StepEnd:
    turn: int  # of the assistant's messages, from 0
    end: int | None  # characters of the message up to the end of the step; None is the end of the turn


# Fills a batch that lacks a sequence; it is not trained on.
PLACEHOLDER = Example(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.bool_))


def mismatched(examples: Sequence[Example], max_length: int) -> list[Example]:
    """Each prompt with the completion of the next example (the first's at the end), cut to length."""
    joined = []
    for prompt_of, completion_of in zip(examples, [*examples[1:], examples[0]], strict=True):
        prompt, first = prompt_of.num_prompt_tokens, completion_of.num_prompt_tokens
        tokens = np.concatenate([prompt_of.tokens[:prompt], completion_of.tokens[first:]])
        mask = np.concatenate([np.zeros(prompt, dtype=np.bool_), completion_of.loss_mask[first:]])
        joined.append(Example(tokens[:max_length], mask[:max_length]))
    return joined


def calibration_prompts(data: DataConfig, policy: PolicyConfig) -> list[Example]:
    """The first prompts of `data.train`, equally many of each source of a mixture, without answers.

    As many as `policy.quantization.calibration.prompts`, cut to the longest sequence. Raises DatasetError
    where no task has a text, and TokenizerError.
    """
    calibration = policy.quantization.calibration if policy.quantization is not None else None
    assert calibration is not None, "a calibrated format requires it"
    tasks, tokenizer = load_tasks(data.train, data), load_tokenizer(policy)
    sizes = source_sizes(tasks)
    of_each = -(-calibration.prompts // len(sizes))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    first = [range(start, start + min(size, of_each)) for start, size in zip(starts, sizes, strict=True)]
    prompts, examples = prompts_of(tokenizer, data.chat), []
    for task in (tasks[index] for indices in first for index in indices):
        if any(message.role == "user" and message.content for message in task.messages):
            opening = prompts.with_tools(task.tools).open(task.messages)
            tokens = opening[: policy.max_sequence_length]
            examples.append(Example(np.array(tokens, dtype=np.int32), np.arange(len(tokens)) > 0))
    if not examples:
        fix = "use fp8_channel or nvfp4_w4a16, or data.train with texts"
        raise DatasetError(f"policy.quantization.calibration: no task of data.train has a prompt; {fix}")
    return examples


T = TypeVar("T")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Encoder:
    """Makes examples of at most `max_length` tokens. Raises ExampleError, in a list with the number."""

    tokenizer: Tokenizer
    prompts: Prompts
    max_length: int

    def dialogues(self, given: Iterable[Dialogue | Text], train_on: TrainOn) -> list[Example]:
        def encode(one: Dialogue | Text) -> Example:
            if isinstance(one, Text):
                return self.text(one)
            return self.dialogue(one.opening, one.exchange, train_on, one.tools)

        return _each(given, encode)

    def pairs(self, pairs: Iterable[Pair]) -> list[tuple[Example, Example]]:
        def encode(pair: Pair, answer: Sequence[Message]) -> Example:
            return self.dialogue(pair.opening, answer, tools=pair.tools)

        return _each(pairs, lambda pair: (encode(pair, pair.chosen), encode(pair, pair.rejected)))

    def feedback(self, feedback: Iterable[Feedback]) -> list[Example]:
        return _each(feedback, lambda f: self.dialogue(f.opening, f.completion, tools=f.tools))

    def steps(self, answers: Iterable[Steps]) -> list[Example]:
        return _each(answers, self.answer_in_steps)

    def dialogue(
        self,
        opening: Sequence[Message],
        exchange: Sequence[Message],
        train_on: TrainOn = "completion",
        tools: ToolSchemas = (),
    ) -> Example:
        """Encode an exchange; the assistant's turns are trained on. Raises ExampleError or TemplateError."""
        roles = [message.role for message in exchange]
        if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
            raise ExampleError(f"the exchange must begin and end with an assistant's message, not {roles}")
        prompts = self.prompts.with_tools(tools)
        tokens = prompts.open(opening)
        if not tokens and train_on != "all":
            raise ExampleError("the prompt is empty, so the first token has no probability")
        trained = [False] * len(tokens)
        for place, message in enumerate(exchange):
            if message.role != "assistant":
                continue
            is_last = place + 1 == len(exchange)
            following = len(exchange) if is_last else place + 1 + roles[place + 1 :].index("assistant")
            history, answered = [*opening, *exchange[:place]], exchange[place + 1 : following]
            turn = prompts.turn(history, message, answered)
            tokens += turn
            trained += [True] * len(turn)
            if not is_last:
                between = prompts.after_turn(history, message, answered, turn[-1])
                tokens += between
                trained += [False] * len(between)
        self._check_length(len(tokens), trained.index(True))
        if train_on == "all":
            # The first follows nothing, so it has no probability.
            trained = [False, *[True] * (len(tokens) - 1)]
        return Example(np.array(tokens, dtype=np.int32), np.array(trained))

    def text(self, text: Text) -> Example:
        """All tokens are trained on but the first, which follows nothing. Raises ExampleError."""
        tokens = self.tokenizer.encode_document(text.content)
        tokens += [self.tokenizer.eos_token_id] if text.end_token else []
        if text.truncate:
            tokens = tokens[: self.max_length]
        elif len(tokens) > self.max_length:
            problem = f"the text has {len(tokens)} tokens, more than {self.max_length}"
            fix = (
                "set `truncate` of its dataset to cut it, raise `policy.max_sequence_length` or leave it out"
            )
            raise ExampleError(f"{problem}: {fix}")
        if not tokens:
            raise ExampleError("the text has no tokens: leave it out")
        return Example(np.array(tokens, dtype=np.int32), np.arange(len(tokens)) > 0)

    def answer_in_steps(self, answer: Steps) -> Example:
        """An answer in steps, each labeled at its last token."""
        steps, labels = answer.steps, answer.labels
        if not steps or len(steps) != len(labels):
            raise ExampleError(f"there are {len(steps)} steps and {len(labels)} labels: label every step")
        tokens = self.prompts.with_tools(answer.tools).open(answer.opening)
        if not tokens:
            raise ExampleError("the prompt is empty")
        start, ends = len(tokens), []
        for index, step in enumerate(steps):
            encoded = self.tokenizer.encode(step)
            if not encoded:
                raise ExampleError(f"step {index} is empty")
            tokens += encoded
            ends.append(len(tokens) - 1)
        self._check_length(len(tokens), start)
        mask, marks = np.zeros(len(tokens), dtype=np.bool_), np.zeros(len(tokens), dtype=np.float32)
        mask[ends], marks[ends] = True, 2 * np.array(labels, dtype=np.float32) - 1
        return Example(np.array(tokens, dtype=np.int32), mask, marks)

    def exchange_in_steps(
        self, opening: Sequence[Message], exchange: Sequence[Message], separator: str
    ) -> tuple[Example, list[StepEnd]]:
        """An exchange whose steps are marked as in `answer_in_steps`, and where the steps end.

        Each step ends with the separator; without one each token is a step. A turn that says nothing, or
        with calls or reasoning of its own, is one step. Raises ExampleError or TemplateError.
        """
        tokens, ends, marked = self.prompts.open(opening), list[StepEnd](), list[int]()
        num_prompt, turn = len(tokens), 0
        if not tokens:
            raise ExampleError("the prompt is empty")
        for place, message in enumerate(exchange):
            if message.role != "assistant":
                continue
            rest = exchange[place + 1 :]
            following = next((n for n, one in enumerate(rest) if one.role == "assistant"), len(rest))
            history, answered = [*opening, *exchange[:place]], rest[:following]
            if message.tool_calls or message.reasoning is not None:
                tokens += self.prompts.turn(history, message, answered)
                marked.append(len(tokens) - 1)
                ends.append(StepEnd(turn, None))
            else:
                nothing = [(self.tokenizer.encode(separator) or [self.prompts.end_token_id], None)]
                for step, end in [*self._steps(message.content, separator)] or nothing:
                    tokens += step
                    marked.append(len(tokens) - 1)
                    ends.append(StepEnd(turn, end))
                if rest and tokens[-1] != self.prompts.end_token_id:
                    tokens.append(self.prompts.end_token_id)
            if rest:
                tokens += self.prompts.after_turn(history, message, answered, tokens[-1])
            turn += 1
        self._check_length(len(tokens), num_prompt)
        mask = np.zeros(len(tokens), dtype=np.bool_)
        mask[marked] = True
        return Example(np.array(tokens, dtype=np.int32), mask), ends

    def _steps(self, text: str, separator: str) -> Iterator[tuple[list[int], int | None]]:
        """The tokens of each step, and the characters of the text up to its end."""
        if not separator:
            for token, end in zip(*self.tokenizer.encode_with_ends(text), strict=True):
                yield [token], end
            return
        end, steps = 0, text.split(separator)
        for number, step in enumerate(steps, start=1):
            end += len(step) + len(separator) * (number < len(steps))
            if step.strip():
                yield self.tokenizer.encode(step + separator), end

    def _check_length(self, num_tokens: int, num_prompt: int) -> None:
        if num_tokens > self.max_length:
            tokens = f"{num_prompt} prompt and {num_tokens - num_prompt} answer tokens"
            fix = "raise `policy.max_sequence_length` or leave it out"
            raise ExampleError(f"there are {tokens}, more than {self.max_length}: {fix}")


def _each(found: Iterable[T], made_of: Callable[[T], Made]) -> list[Made]:
    made = []
    for index, one in enumerate(found):
        try:
            made.append(made_of(one))
        except ExampleError as error:
            raise ExampleError(f"example {index}: {error}") from error
    return made
