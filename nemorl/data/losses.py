"""What a policy worker asks of a loss. It knows no algorithm; an algorithm hands it one of these."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .packed import PackedBatch


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch as a plain sum; summed over micro-batches and data-parallel ranks."""

    loss: Tensor  # scalar, float32, differentiable
    sums: dict[
        str, Tensor
    ]  # metrics that add up over micro-batches and ranks (already weighted); detached scalars
    maxima: dict[str, Tensor]  # metrics of which the largest counts; detached scalars


class Loss(Protocol):
    """A pure function of the batch and the policy's own logprobs; picklable."""

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropies are to be computed, which costs a little in backward."""
        ...

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """`logprobs` [N] and `entropy` [N] of the distribution before each token; float32.

        Both are computed for the tokens of `loss_mask` only, and 0 elsewhere.
        """
        ...
