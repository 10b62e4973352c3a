"""Samples of another policy than the one that learns: other arithmetic, older weights, several updates.

docs/off_policy.md has the formulas.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemorl.config.base import Config, default_variant

Level = Literal["token", "sequence", "geometric"]


class SequenceMaskConfig(Config):
    """Whole sequences are left out by the geometric mean of their tokens' ratios, trainer over engine."""

    low: float = Field(gt=0, lt=1)
    """A sequence counts when the mean ratio is at least this."""
    high: float = Field(gt=1)
    """A sequence counts when the mean ratio is at most this."""


class CorrectionBase(Config):
    """What all corrections share."""

    form: Literal["decoupled", "bypass"] = "decoupled"
    """Three policies, whose old one the trainer computes, or two: the engine's logprobs are the old ones."""
    sequence_mask: SequenceMaskConfig | None = None
    """Leave out sequences that engine and trainer see too differently."""
    off_policy_threshold: float | None = Field(None, gt=0)
    """Leave out sequences of negative advantage that became unlikelier by more nats per token than this."""
    divisor: Literal["all", "kept"] = "all"
    """What divides the loss: all sampled tokens, also those left out, which keep divergence and entropy; or,
    as in verl, those that the bounds of `mis` and `icepop` and `sequence_mask` keep: others have no term."""

    weighs: ClassVar[bool] = True  # tokens or sequences get weights
    bounds_leave_out: ClassVar[bool] = False  # what weighs too much gets the weight 0

    @property
    def leaves_out(self) -> bool:
        """Whether some tokens may have no loss for what old policy and engine say of them."""
        return self.bounds_leave_out or self.sequence_mask is not None

    @property
    def compares(self) -> bool:
        """Whether old policy and engine are compared for more than figures."""
        return self.weighs or self.sequence_mask is not None

    @property
    def changes_terms(self) -> bool:
        """Whether the loss of some tokens may be weighed or left out."""
        return self.compares or self.off_policy_threshold is not None


class NoCorrectionConfig(CorrectionBase):
    """No weights."""

    name: Literal["none"] = "none"

    weighs: ClassVar[bool] = False


class TruncatedCorrectionConfig(CorrectionBase):
    """Truncated importance sampling: weights are cut to the bounds."""

    name: Literal["tis"]
    level: Level = "token"
    """The weight is of a token, of its sequence (product), or of its sequence's geometric mean."""
    low: float = Field(0.0, ge=0)
    """Smaller weights become this."""
    high: float = Field(2.0, gt=0)
    """Larger weights become this."""


class MaskedCorrectionConfig(CorrectionBase):
    """Masked importance sampling: what weighs too much is left out."""

    name: Literal["mis"]
    level: Level = "token"
    """The weight is of a token, of its sequence (product), or of its sequence's geometric mean."""
    high: float = Field(2.0, gt=0)
    """Larger weights become 0."""

    bounds_leave_out: ClassVar[bool] = True


class IcePopCorrectionConfig(CorrectionBase):
    """IcePop: what weighs too little or too much is left out (Ling Team 2025, arXiv 2510.18855)."""

    name: Literal["icepop"]
    level: Level = "token"
    """The weight is of a token, of its sequence (product), or of its sequence's geometric mean."""
    low: float = Field(0.5, ge=0)
    """Smaller weights become 0."""
    high: float = Field(5.0, gt=0)
    """Larger weights become 0."""

    bounds_leave_out: ClassVar[bool] = True


CorrectionConfig = Annotated[
    NoCorrectionConfig | TruncatedCorrectionConfig | MaskedCorrectionConfig | IcePopCorrectionConfig,
    Field(discriminator="name"),
    default_variant(NoCorrectionConfig),
]
