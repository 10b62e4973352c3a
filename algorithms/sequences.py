"""Sums and means over the sampled tokens of each sequence of a packed batch.

A micro-batch always holds whole sequences: no sequence is split over micro-batches or data-parallel ranks,
and under context parallelism every rank is given the logprobs of all tokens and takes its part of the
gradient (`nemorl.megatron.model`). So these sums need no communication.
"""

import torch
from torch import Tensor

from nemorl.data.packed import PackedBatch


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
