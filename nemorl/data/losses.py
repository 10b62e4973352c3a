"""Protocols between the policy worker and algorithms, and the results of the worker's calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from .packed import PackedBatch


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch as a plain sum; summed over micro-batches and data-parallel ranks."""

    loss: Tensor  # scalar, float32, differentiable
    sums: dict[str, Tensor]  # metrics that add up over micro-batches and ranks; detached scalars
    maxima: dict[str, Tensor]  # metrics of which the largest counts; detached scalars


class Loss(Protocol):
    """A pure function of the batch and of what the model says about its tokens; picklable."""

    @property
    def needs_entropy(self) -> bool: ...

    def __call__(self, batch: PackedBatch, outputs: Tensor, entropy: Tensor | None, /) -> LossOutput:
        """`outputs` [N] and `entropy` [N], float32.

        Outputs are logprobs; they and the entropy are of the distribution before each token, after the
        filters of sampling where there are any, and 0 outside `loss_mask`. Of a scalar head they are the
        values after each token, and there is no entropy.
        """


@runtime_checkable
class UpdateLoss(Loss, Protocol):
    """A loss that looks at all of an optimizer step's sequences before it is asked about any micro-batch."""

    def prepared(
        self, batch: PackedBatch, over_ranks: Callable[[Tensor], Tensor], step: PackedBatch, /
    ) -> Loss:
        """The loss of micro-batches of `batch`, a part of `step`, which all updates of a step share.

        `over_ranks` joins values [n] of all data-parallel ranks.
        """


@runtime_checkable
class CandidateLoss(Loss, Protocol):
    """A loss called with logprobs [N, 1 + C], of each token and of its candidates, and a detached entropy."""

    def candidates(self, batch: PackedBatch, /) -> Tensor:
        """[N, C] int64; outside the loss mask any."""


@runtime_checkable
class UnfilteredLoss(Loss, Protocol):
    """A loss with a term of the distribution that no filter of sampling has cut."""

    @property
    def needs_unfiltered(self) -> bool: ...

    def __call__(
        self, batch: PackedBatch, outputs: Tensor, entropy: Tensor | None, unfiltered: Tensor | None = None, /
    ) -> LossOutput:
        """`unfiltered` [N]: logprobs of that distribution; None where the outputs are of it."""


@dataclass(frozen=True)
class TokenEstimate:
    """An estimate for the tokens of a data-parallel rank; metrics are equal on all ranks."""

    advantages: Tensor  # [N] float32, 0 where loss_mask is False
    returns: Tensor | None  # [N] float32, that a critic learns of the state before each token
    metrics: dict[str, float]


class TokenEstimator(Protocol):
    """A pure function of a data-parallel rank's whole batch; picklable."""

    def __call__(self, batch: PackedBatch, sum_over_ranks: Callable[[Tensor], Tensor], /) -> TokenEstimate:
        """`sum_over_ranks` adds up a float64 tensor over the data-parallel ranks, which all call it."""


SequenceMetric = Callable[[PackedBatch], Tensor]  # a number [S] for each sequence; pure and picklable


@dataclass(frozen=True)
class LogprobStats:
    """The engine's logprobs compared with the trainer's, over all sampled tokens of the policy's batch."""

    gap_mean: float  # mean of |trainer - engine|; 0 when the batch carries no engine's logprobs
    gap_max: float
    num_tokens: int
    flops: float = 0.0  # operations of the model for its own logprobs, if computed (plan.utilization)
    reference_flops: float = 0.0  # for those of a reference that its processes keep


@dataclass(frozen=True)
class ValueStats:
    """A critic's values of the tokens of the loss mask."""

    mean: float
    num_tokens: int
    flops: float = 0.0  # operations of the model


@dataclass(frozen=True)
class Evaluation:
    """A loss that was computed without learning; equal on all ranks."""

    sums: dict[str, float]  # the loss's metrics, summed over the global batch
    maxima: dict[str, float]


@dataclass(frozen=True)
class TrainStats:
    sums: dict[str, float]  # the loss's metrics, summed over the global batch
    maxima: dict[str, float]
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # not finite, or beyond a limit of a guard: nothing was changed
    empty: bool  # the gradients were all 0: nothing was changed
    num_tokens: int  # tokens of the global batch, prompts included
    num_distinct: int  # these, where a micro-batch shares beginnings, counted once
    num_computed: int  # these with padding
    flops: float = 0.0  # operations of the model for `num_distinct`, forward and backward (plan.utilization)
    peak_tflops: float | None = None  # of a device, where it is known
    experts: dict[str, float] | None = None  # metrics of the router, of models that have experts
    mtp: dict[str, float] = field(default_factory=dict)  # metrics of the layers for further tokens
    draft: dict[str, float] = field(default_factory=dict)  # metrics of the head for drafts
    guards: Mapping[str, bool] = field(default_factory=dict)  # of each quantity with limits: it is beyond one
    skip_reason: str = ""
    skipped_in_a_row: int = 0  # updates until this one
