"""What is trained on in `training.py`: ragged sequences as of rollouts, groups, or all of one length."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from nemorl.data.examples import Example
from nemorl.data.prefixes import Run, shared_runs
from nemorl.data.shards import plan_batch
from nemorl.models.layout import hf_tensors
from nemorl.models.shape import ModelShape

# Lengths of rollouts: prompts uniform, completions log-normal and cut off at the limit of new tokens.
PROMPT_TOKENS = (16, 48)
COMPLETION_MEDIAN, COMPLETION_SIGMA, COMPLETION_LIMIT = 64, 0.8, 320
COMPLETION_AT_LEAST = 4
GROUP = 8  # samples of a prompt


@dataclass(frozen=True)
class Padded:
    """A chunk of `B` rows of `L` places, of which `P` of each row predict a token that some row learns."""

    tokens: torch.Tensor  # [B, L] int64
    attention: torch.Tensor  # [B, L] int64, 0 at padding
    predicting: torch.Tensor  # [P] places
    labels: torch.Tensor  # [B, P] the token after each of them
    weights: torch.Tensor  # [B, P] float32, 0 where the token is not trained

    def to(self, device: torch.device) -> "Padded":
        """The same on a device."""
        return Padded(*(getattr(self, f.name).to(device) for f in fields(self)))


@dataclass(frozen=True)
class Work:
    """Sequences of one training step, in their order of arrival. The tokens after the prompt are trained."""

    prompts: tuple[int, ...]  # tokens of each prompt
    lengths: tuple[int, ...]  # tokens of each sequence, prompt included
    micro_batch_tokens: int
    vocab_size: int
    seed: int = 0
    samples: int = 1  # sequences in a row that have the tokens of one prompt

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(self.lengths)

    @property
    def num_trained(self) -> int:
        """Tokens that enter the loss."""
        return self.num_tokens - sum(self.prompts)

    def examples(self) -> list[Example]:
        """Random tokens of these lengths."""
        drawn = np.random.default_rng(self.seed)
        tokens = [drawn.integers(0, self.vocab_size, length).astype(np.int32) for length in self.lengths]
        for number, (own, prompt) in enumerate(zip(tokens, self.prompts, strict=True)):
            own[:prompt] = tokens[number - number % self.samples][:prompt]
        return [
            Example(own, np.arange(len(own)) >= prompt)
            for own, prompt in zip(tokens, self.prompts, strict=True)
        ]

    def weights(self) -> list[float]:
        """Of the trained tokens of each sequence: the loss is their mean."""
        return [1 / self.num_trained] * len(self.lengths)

    def runs(self) -> list[tuple[Run, ...]]:
        """What sequences share, as rollout workers report it."""
        return shared_runs([example.tokens for example in self.examples()])

    def packed(self, hidden_size: int, runs: Sequence[tuple[Run, ...]] | None = None) -> list[list[int]]:
        """Sequences of each micro-batch, as the driver plans them."""
        plan = plan_batch(self.lengths, 1, 1, self.micro_batch_tokens, hidden_size, runs=runs)
        [[micro_batches]], [held] = plan.minibatches, plan.ranks
        return [[held[place] for place in batch] for batch in micro_batches]

    def chunks(self, count: int, *, by_length: bool) -> list[list[int]]:
        """The sequences in `count` chunks of equal numbers, in order of arrival or of length."""
        order = list(range(len(self.lengths)))
        if by_length:
            order.sort(key=lambda i: self.lengths[i])
        size = math.ceil(len(order) / count)
        return [order[start : start + size] for start in range(0, len(order), size)]

    def padded(self, chunks: list[list[int]], device: torch.device) -> Iterator[Padded]:
        """Each chunk as rows of one matrix, filled up at their ends to its longest."""
        return (self._rows(chunk).to(device) for chunk in chunks)

    def _rows(self, chunk: list[int]) -> Padded:
        examples, weights = self.examples(), self.weights()
        longest = max(self.lengths[i] for i in chunk)
        first = min(self.prompts[i] for i in chunk)  # no token before it is trained
        tokens = torch.zeros(len(chunk), longest, dtype=torch.int64)
        attention = torch.zeros_like(tokens)
        trained = torch.zeros(len(chunk), longest)
        for row, i in enumerate(chunk):
            length = self.lengths[i]
            tokens[row, :length] = torch.from_numpy(examples[i].tokens)
            attention[row, :length] = 1
            trained[row, :length] = torch.from_numpy(examples[i].loss_mask) * weights[i]
        return Padded(
            tokens, attention, torch.arange(first - 1, longest - 1), tokens[:, first:], trained[:, first:]
        )


def rollout_work(count: int, micro_batch_tokens: int, vocab_size: int, seed: int = 0) -> Work:
    """`count` sequences with the lengths of rollouts."""
    drawn = np.random.default_rng(seed)
    prompts = drawn.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, count)
    completions = drawn.lognormal(math.log(COMPLETION_MEDIAN), COMPLETION_SIGMA, count)
    completions = completions.clip(COMPLETION_AT_LEAST, COMPLETION_LIMIT).astype(int)
    return Work(
        tuple(prompts.tolist()), tuple((prompts + completions).tolist()), micro_batch_tokens, vocab_size, seed
    )


def group_work(groups: int, prompt: int, limit: int, micro_batch_tokens: int, vocab_size: int) -> Work:
    """Groups of `GROUP` answers, each to a prompt of `prompt` tokens; answers have at most `limit`."""
    count, drawn = groups * GROUP, np.random.default_rng(0)
    completions = drawn.lognormal(math.log(COMPLETION_MEDIAN), COMPLETION_SIGMA, count)
    completions = completions.clip(COMPLETION_AT_LEAST, limit).astype(int)
    lengths = tuple((prompt + completions).tolist())
    return Work((prompt,) * count, lengths, micro_batch_tokens, vocab_size, samples=GROUP)


def equal_work(count: int, length: int, micro_batch_tokens: int, vocab_size: int) -> Work:
    """`count` sequences of `length` tokens; all but the first token of each are trained."""
    return Work((1,) * count, (length,) * count, micro_batch_tokens, vocab_size)


def padding_waste(lengths: tuple[int, ...], chunks: list[list[int]]) -> float:
    """Share of the computed places that is padding, when each chunk is padded to its own longest."""
    places = sum(max(lengths[i] for i in chunk) * len(chunk) for chunk in chunks)
    return 1 - sum(lengths) / places


def training_flops(shape: ModelShape, work: Work) -> float:
    """Operations that forward and backward of a dense model need: no padding, no recomputation.

    Two a weight and token, of the output layer for trained tokens only; causal attention multiplies two
    matrices of half `length²` places a head. Backward costs twice the forward.
    """
    matrices = sum(
        math.prod(extents)
        for name, extents in hf_tensors(shape).items()
        if ".layers." in name and len(extents) == 2
    )
    attention = 2 * shape.num_layers * shape.num_attention_heads * shape.head_dim
    forward = (
        2 * matrices * work.num_tokens
        + 2 * shape.vocab_size * shape.hidden_size * work.num_trained
        + attention * sum(length**2 for length in work.lengths)
    )
    return 3.0 * forward


def growth(sizes: list[float], costs: list[float]) -> float:
    """Exponent `b` of the best fit `cost = a * size ** b`: least squares of the logarithms."""
    x, y = np.log(sizes), np.log(costs)
    return float(np.polyfit(x, y, 1)[0])
