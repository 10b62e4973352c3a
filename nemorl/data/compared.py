"""What a loss knows of whole sequences that it holds against others, such as the two of a pair."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .packed import PackedBatch


@dataclass(frozen=True)
class Compared:
    """One sequence among those that are learnt together."""

    unit: int  # sequences of one number go into one micro-batch
    label: float = 0.0  # 1 chosen or desirable, -1 rejected or not, 0 neither
    margin: float = 0.0  # by how much the better sequence of the unit is better
    reference: float | None = None  # sum of the reference's logprobs of its learnt tokens, where it is known


def with_compared(batch: PackedBatch, compared: Sequence[Compared]) -> PackedBatch:
    """The batch with what is known of its sequences [S] at each of their tokens.

    A reference's sum is laid evenly over the learnt tokens, since losses ask for sums and means only.
    """
    lengths = torch.tensor(batch.lengths)

    def spread(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(lengths)

    batch = replace(batch, units=spread([c.unit for c in compared], torch.int64))
    if batch.labels is None:  # those of steps stand
        batch = replace(batch, labels=spread([c.label for c in compared], torch.float32))
    if any(c.margin for c in compared):
        batch = replace(batch, margins=spread([c.margin for c in compared], torch.float32))
    known = [c.reference for c in compared if c.reference is not None]
    if len(known) < len(compared):
        return batch
    learnt = [max(int(mask.sum()), 1) for mask in batch.loss_mask.split(batch.lengths)]
    means = spread([total / count for total, count in zip(known, learnt, strict=True)], torch.float32)
    return replace(batch, reference_logprobs=means * batch.loss_mask)
