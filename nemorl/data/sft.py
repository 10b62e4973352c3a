"""Supervised examples: prompt, answer and end token, joined exactly as a rollout would join them."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nemorl.errors import NemorlError
from nemorl.rollout.types import BoolArray, Int32Array, Task

from .prompts import Prompts
from .tokenizer import Tokenizer


class ExampleError(NemorlError, ValueError):
    """A task that is no example to learn from; the message names the task."""


@dataclass(frozen=True)
class SftExample:
    """One sequence to learn. `T` is the number of its tokens."""

    tokens: Int32Array  # [T]
    loss_mask: BoolArray  # [T] True where the token is learnt

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def num_learnt(self) -> int:
        """Tokens that enter the loss."""
        return int(self.loss_mask.sum())


def sft_example(
    task: Task,
    tokenizer: Tokenizer,
    prompts: Prompts,
    train_on: Literal["completion", "all"],
    max_length: int,
) -> SftExample:
    """The task's prompt and answer as one sequence, closed by the token that ends a turn.

    Prompt and answer are encoded apart, as they are when the policy samples, so the first learnt token is the
    first one it would sample. Raises ExampleError for a task without an answer, an empty prompt or more than
    `max_length` tokens.
    """
    if task.answer is None:
        raise ExampleError(
            f"task {task.index} has no answer to learn: name its key in `data.train.answer_key`"
        )
    prompt = prompts.open(task.messages)
    answer = [*tokenizer.encode(task.answer), prompts.end_token_id]
    if not prompt:
        raise ExampleError(f"task {task.index} has an empty prompt, so its first token cannot be learnt")
    if len(prompt) + len(answer) > max_length:
        raise ExampleError(
            f"task {task.index} has {len(prompt)} prompt and {len(answer)} answer tokens, more than "
            f"{max_length}: raise `policy.max_sequence_length` or leave the task out"
        )
    tokens = np.array(prompt + answer, dtype=np.int32)
    # The first token follows nothing, so it has no probability to learn.
    first_learnt = len(prompt) if train_on == "completion" else 1
    return SftExample(tokens, np.arange(len(tokens)) >= first_learnt)
