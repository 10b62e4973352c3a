"""What policy calls answer. The driver reads these, so this module imports neither torch nor Megatron."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LogprobStats:
    """The engine's logprobs beside the trainer's, over all sampled tokens of the policy's batch."""

    gap_mean: float  # mean of |trainer - engine|; 0 when the batch carries no engine's logprobs
    gap_max: float
    num_tokens: int  # sampled tokens (of the loss mask)


@dataclass(frozen=True)
class ValueStats:
    """A critic's values of the tokens of the loss mask, over the whole batch of the policy."""

    mean: float
    num_tokens: int  # of the loss mask


@dataclass(frozen=True)
class TrainStats:
    """One optimizer step; equal on all ranks."""

    sums: dict[str, float]  # the loss's metrics, summed over the global batch
    maxima: dict[str, float]
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # the gradients were not finite: nothing was changed
    num_tokens: int  # tokens of the global batch, prompts included
    num_computed: int  # the same with padding
