"""What the policy's entropy is worth."""

from typing import Annotated, Literal

from pydantic import Field

from nemorl.config.base import Config, default_variant


class EntropyBonusConfig(Config):
    """A fixed weight, for each token as the loss weighs it."""

    name: Literal["bonus"] = "bonus"
    coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy that is added to the objective."""


class AdaptiveEntropyConfig(Config):
    """A weight that grows while the entropy is below a target (Skywork-OR1, He et al. 2025, 2505.22312)."""

    name: Literal["adaptive"]
    target: float = Field(0.2, gt=0)
    """Mean entropy per token, in nats, below which the bonus counts."""
    initial: float = Field(0.0, ge=0)
    """Weight of the first step."""
    change: float = Field(0.005, gt=0)
    """What a step adds to the weight below the target, and takes from it above."""
    max_coefficient: float = Field(1.0, gt=0)
    """The weight stays between 0 and this."""


EntropyConfig = Annotated[
    EntropyBonusConfig | AdaptiveEntropyConfig,
    Field(discriminator="name"),
    default_variant(EntropyBonusConfig),
]
