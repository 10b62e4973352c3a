"""Which tokens of an update have a policy loss, where only those of the highest entropy do."""

from nemorl.data.packed import PackedBatch

from .covariance import OverRanks


def least_entropy(batch: PackedBatch, quantile: float, over_ranks: OverRanks) -> float:
    """The smallest entropy among the `quantile` of an update's tokens that has the highest ones.

    "Beyond the 80/20 rule" (Wang et al. 2025, arXiv 2506.01939); `batch` is this rank's part. At least one
    token is above it, and of equals all: `1 + floor(quantile (n - 1))` of n different ones, which is what
    TRL's `top_entropy_quantile` takes. Its border is a micro-batch's; ours is the update's, so that no split
    changes the loss, and the entropies are those before the updates of the step.
    """
    assert batch.old_entropies is not None, "a choice by entropy wants those before the updates"
    entropies = over_ranks(batch.old_entropies[batch.loss_mask])
    if len(entropies) == 0:
        return 0.0
    return float(entropies.topk(1 + int(quantile * (len(entropies) - 1))).values[-1])
