"""The loss of a policy on its own samples."""

from typing import Annotated, Literal

from pydantic import Field

from nemorl.config.base import Config, default_variant

from .base import Aggregation


class PolicyLossBase(Config):
    """What all losses of a policy share."""

    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number; sums are divided by counts of the whole batch."""
    aggregation_length: int | None = Field(None, ge=1)
    """The fixed length that divides in `seq-mean-token-sum-norm`."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy that is added to the objective."""


class ClipLossConfig(PolicyLossBase):
    """PPO's clipped surrogate per token (Schulman et al. 2017, arXiv 1707.06347)."""

    name: Literal["clip"] = "clip"
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above 1 + clip_high."""


PolicyLossConfig = Annotated[ClipLossConfig, Field(discriminator="name"), default_variant(ClipLossConfig)]
