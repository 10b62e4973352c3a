"""How a critic learns; which model it is and where it lives is the section `critic` of the experiment."""

from typing import Literal

from pydantic import Field

from nemorl.config.base import Config


class CriticLearningConfig(Config):
    value_clip: float | None = Field(0.2, gt=0)
    """Values are clipped to this distance from those before the step, and the larger error counts (PPO);
    null clips nothing."""
    aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"
    """How squared errors of tokens become one number."""
    warmup_steps: int = Field(0, ge=0)
    """Steps at the beginning in which the critic alone learns."""
