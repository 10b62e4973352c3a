"""Results of policy calls. The driver reads these, so this module imports neither torch nor Megatron."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LogprobStats:
    """The engine's logprobs compared with the trainer's, over all sampled tokens of the policy's batch."""

    gap_mean: float  # mean of |trainer - engine|; 0 when the batch carries no engine's logprobs
    gap_max: float
    num_tokens: int  # sampled tokens (of the loss mask)


@dataclass(frozen=True)
class ValueStats:
    """A critic's values of the tokens of the loss mask, over the whole batch of the policy."""

    mean: float
    num_tokens: int  # of the loss mask


@dataclass(frozen=True)
class Evaluation:
    """A loss that was computed without learning; equal on all ranks."""

    sums: dict[str, float]  # the loss's metrics, summed over the global batch
    maxima: dict[str, float]


@dataclass(frozen=True)
class ExpertLoad:
    """Distribution of one optimizer step's tokens over the experts of each layer."""

    largest: float  # tokens of the busiest expert over the mean, averaged over the layers
    largest_of_a_layer: float  # the same in the least even layer
    idle: float  # fraction of the experts of all layers that no token chose
    balance_loss: float | None  # of all layers, averaged over sequences; None where it has no coefficient

    def metrics(self) -> dict[str, float]:
        """By the names of the metrics."""
        metrics = {
            "experts/load_max": self.largest,
            "experts/load_max_of_a_layer": self.largest_of_a_layer,
            "experts/idle": self.idle,
        }
        return metrics if self.balance_loss is None else metrics | {"loss/balance": self.balance_loss}


@dataclass(frozen=True)
class TrainStats:
    """One optimizer step; equal on all ranks."""

    sums: dict[str, float]  # the loss's metrics, summed over the global batch
    maxima: dict[str, float]
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # the gradients were not finite: nothing was changed
    empty: bool  # the gradients were all 0: nothing was changed
    num_tokens: int  # tokens of the global batch, prompts included
    num_computed: int  # the same with padding
    experts: ExpertLoad | None = None  # of models that have any
