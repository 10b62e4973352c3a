"""Divergence from the reference policy."""

from typing import Literal

from pydantic import Field

from nemorl.config.base import Config


class KLConfig(Config):
    """Which estimator gives which gradient is told in `nemorl.algorithms.kl` and docs/off_policy.md."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the divergence from the reference policy; 0 keeps no reference at all."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence per token (Schulman, "Approximating KL divergence", 2020)."""
    placement: Literal["loss", "reward"] = "loss"
    """Add it to the loss, where its gradient counts, or take it from each token's reward."""
    straight_through: bool = False
    """In the loss: the value is the estimator's and the gradient k2's, which is that of the divergence."""
    importance_weighted: bool = False
    """In the loss: weigh by the ratio to the policy that sampled, so that stale samples do not bias it."""
    max_value: float | None = Field(None, gt=0)
    """Clamp each token's estimate to ± this, without gradient beyond, also of k2's in `straight_through`;
    verl and OpenRLHF: 10."""
