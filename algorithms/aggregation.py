"""From losses per token to one number.

Every scheme is a weight for the sampled tokens of each sequence, made from counts of the whole optimizer
step. The loss is then a plain sum of `weight * token_loss`, which no split into micro-batches or ranks
changes.

Sums and means over the sampled tokens of each sequence of a packed batch.

A micro-batch always holds whole sequences: no sequence is split over micro-batches or data-parallel ranks,
and under context parallelism every rank is given the logprobs of all tokens and takes its part of the
gradient (`nemorl.megatron.model`). So these sums need no communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl.config.algorithm import Aggregation
from nemorl.data.packed import PackedBatch


@dataclass(frozen=True)
class Divisor:
    """What an optimizer step has of that which enters the loss; at least 1, so that nothing divides by 0."""

    tokens: float
    sequences: int  # with any such token

    @classmethod
    def of(cls, sampled: Sequence[float]) -> "Divisor":
        """Of all sequences of the step, by their numbers of such tokens."""
        return cls(max(sum(sampled), 1), max(sum(count > 0 for count in sampled), 1))


def sequence_weights(
    sampled: Sequence[float],
    aggregation: Aggregation,
    length: int | None = None,
    divisor: Divisor | None = None,
) -> Tensor:
    """Weight of each sampled token, one per sequence: [S] float32.

    `sampled` [S] counts the tokens that enter the loss; a sequence without any has weight 0 and does not
    count as a sequence. `length` is the fixed divisor of `seq-mean-token-sum-norm` (Dr. GRPO, Liu et al.
    2025, arXiv 2503.20783); the names of the schemes are the field's. The `divisor` is the whole step's where
    `sampled` is a part of it.
    """
    counts = torch.tensor(sampled, dtype=torch.float64)
    present = counts > 0
    whole = divisor or Divisor.of(sampled)
    tokens, sequences = whole.tokens, whole.sequences
    match aggregation:
        case "token-mean":
            weights = torch.ones_like(counts) / tokens
        case "token-sum":
            weights = torch.ones_like(counts)
        case "seq-mean-token-mean":
            weights = 1 / (counts.clamp(min=1) * sequences)
        case "seq-mean-token-sum":
            weights = torch.ones_like(counts) / sequences
        case "seq-mean-token-sum-norm":
            if length is None:
                raise ValueError(
                    "seq-mean-token-sum-norm divides by a fixed length: set loss.aggregation_length"
                )
            weights = torch.ones_like(counts) / (sequences * length)
    return torch.where(present, weights, torch.zeros_like(weights)).float()


def sequence_of(batch: PackedBatch) -> Tensor:
    """[N] int64: the number of each token's sequence."""
    numbers = torch.arange(batch.num_sequences, device=batch.tokens.device)
    return numbers.repeat_interleave(torch.diff(batch.cu_seqlens).long(), output_size=batch.num_tokens)


def totals(values: Tensor, batch: PackedBatch) -> Tensor:
    """[S]: the sum of `values` [N] over the loss mask of each sequence."""
    masked = torch.where(batch.loss_mask, values, torch.zeros_like(values))
    return values.new_zeros(batch.num_sequences).index_add(0, sequence_of(batch), masked)


def averages(values: Tensor, batch: PackedBatch) -> Tensor:
    """[S]: the mean of `values` [N] over the loss mask of each sequence; 0 of none."""
    return totals(values, batch) / totals(torch.ones_like(values), batch).clamp(min=1)


def sequence_sums(values: Tensor, batch: PackedBatch) -> Tensor:
    """[N]: `totals` at all tokens of each sequence."""
    return totals(values, batch).index_select(0, sequence_of(batch))


def sequence_means(values: Tensor, batch: PackedBatch) -> Tensor:
    """[N]: `averages` at all tokens of each sequence."""
    return averages(values, batch).index_select(0, sequence_of(batch))
