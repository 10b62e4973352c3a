"""Divergence from the reference policy."""

from typing import Literal

from pydantic import Field

from nemorl.config.base import Config


class KLConfig(Config):
    coefficient: float = Field(0.0, ge=0)
    """Weight of the divergence from the reference policy; 0 keeps no reference at all."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence per token (Schulman, "Approximating KL divergence", 2020)."""
    placement: Literal["loss", "reward"] = "loss"
    """Add it to the loss, where its gradient counts, or take it from each token's reward."""
