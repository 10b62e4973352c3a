"""Whole sequences of a micro-batch, and which of them are a pair."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl.data.packed import PackedBatch

from .sequences import averages, totals


@dataclass(frozen=True)
class Pairs:
    """P pairs of a micro-batch, by their places among its sequences."""

    chosen: Tensor  # [P] int64
    rejected: Tensor  # [P] int64
    margins: Tensor  # [P] float32, by how much the chosen is better; 0 where nothing is said

    def __len__(self) -> int:
        return self.chosen.shape[0]


def find_pairs(batch: PackedBatch) -> Pairs:
    """The pairs, which the planner has kept together; sequences without a label are left out."""
    assert batch.units is not None, "pairs want to know which sequences belong together"
    units, labels = at_starts(batch.units, batch), sequence_labels(batch)
    chosen, rejected = _by_unit(labels > 0, units), _by_unit(labels < 0, units)
    if not torch.equal(units[chosen], units[rejected]):
        raise ValueError("a pair was split: its sequences lie in different micro-batches")
    margins = torch.zeros_like(labels) if batch.margins is None else at_starts(batch.margins, batch)
    return Pairs(chosen, rejected, margins[chosen])


def sequence_labels(batch: PackedBatch) -> Tensor:
    """[S] 1, -1, or 0 for neither."""
    assert batch.labels is not None, "what is compared has labels"
    return at_starts(batch.labels, batch)


def at_starts(values: Tensor, batch: PackedBatch) -> Tensor:
    """[S]: `values` [N] at the first token of each sequence."""
    return values[batch.cu_seqlens[:-1].long()]


def at_ends(values: Tensor, batch: PackedBatch) -> Tensor:
    """[S]: `values` [N] at the last token of each sequence."""
    return values[batch.cu_seqlens[1:].long() - 1]


def answer_logprobs(logprobs: Tensor, batch: PackedBatch, *, mean: bool) -> Tensor:
    """[S]: of each sequence's learnt tokens their sum, or their mean."""
    return averages(logprobs, batch) if mean else totals(logprobs, batch)


def _by_unit(wanted: Tensor, units: Tensor) -> Tensor:
    places = wanted.nonzero().squeeze(1)
    return places[units[places].argsort()]
