"""How good a trajectory, or a token of it, was beside what could be expected."""

from typing import Annotated, Literal

from pydantic import Field

from nemorl.config.base import Config, default_variant


class GroupAdvantageConfig(Config):
    """The group's own mean is the baseline (Shao et al. 2024, arXiv 2402.03300)."""

    name: Literal["group"] = "group"
    normalize: bool = True
    """Divide by the standard deviation of the group (unbiased)."""
    leave_one_out: bool = False
    """The baseline of a sample is the mean of the others instead of the mean of all."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""


AdvantageConfig = Annotated[
    GroupAdvantageConfig, Field(discriminator="name"), default_variant(GroupAdvantageConfig)
]
