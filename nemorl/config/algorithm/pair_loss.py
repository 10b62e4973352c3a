"""Losses of two answers to one prompt, of which one is better.

What is compared are logprobs of whole answers: `x = log policy` of an answer, less `log reference` where the
loss keeps a reference; `delta` is x of the chosen less x of the rejected.
"""

from typing import Annotated, Literal

from pydantic import Field

from nemorl.config.base import Config, default_variant


class PairLossBase(Config):
    """What all losses of pairs share."""

    beta: float = Field(0.1, gt=0)
    """How much a difference of logprobs counts; of losses with a reference, the weight of staying near it."""
    logprobs: Literal["sum", "mean"] = "sum"
    """Of an answer's tokens: their sum, which is the answer's logprob, or their mean, free of its length."""

    @property
    def keeps_reference(self) -> bool:
        """Whether logprobs are taken relative to the reference."""
        return True


class LogisticLossConfig(PairLossBase):
    """`-log sigmoid(beta delta - gamma)` (DPO, Rafailov et al. 2023, arXiv 2305.18290).

    Without a reference and with means it is SimPO (Meng et al. 2024, arXiv 2405.14734); smoothed, cDPO
    (Mitchell 2023); with the data's margins, ODPO (Amini et al. 2024, arXiv 2402.10571).
    """

    name: Literal["logistic"] = "logistic"
    reference: bool = True
    """Take logprobs relative to the reference policy."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Chance that a label is wrong: that much of the loss is of the pair the other way round."""
    gamma: float = Field(0.0, ge=0)
    """Margin by which the chosen has to win, in units of the loss's argument."""
    margin_scale: float = Field(0.0, ge=0)
    """Added to gamma for each unit of the pair's own margin, which `data.*.margin_key` names."""

    @property
    def keeps_reference(self) -> bool:
        """As it says."""
        return self.reference


class RobustLossConfig(PairLossBase):
    """DPO's loss, unbiased where labels are wrong by chance (Chowdhury et al. 2024, arXiv 2403.00409)."""

    name: Literal["robust"]
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Chance that a label is wrong."""


class SquaredLossConfig(PairLossBase):
    """`(delta - 1 / (2 beta))^2` (IPO, Azar et al. 2023, arXiv 2310.12036; beta is its tau).

    The paper writes sums; its authors advise means, which is what most implementations compute.
    """

    name: Literal["squared"]
    logprobs: Literal["sum", "mean"] = "mean"
    """Of an answer's tokens: their sum, as in the paper's formula, or their mean."""


class HingeLossConfig(PairLossBase):
    """`max(0, margin - beta delta)` (RSO, Liu et al. 2023, arXiv 2309.06657).

    Without a reference it is SLiC's calibration (Zhao et al. 2023, arXiv 2305.10425).
    """

    name: Literal["hinge"]
    reference: bool = True
    """Take logprobs relative to the reference policy."""
    margin: float = Field(1.0, gt=0)
    """By how much the chosen has to win; beyond that a pair teaches nothing."""

    @property
    def keeps_reference(self) -> bool:
        """As it says."""
        return self.reference


class OddsRatioLossConfig(PairLossBase):
    """`-beta log sigmoid(log odds of the chosen - log odds of the rejected)` of mean logprobs.

    ORPO (Hong et al. 2024, arXiv 2403.07691; beta is its lambda); it belongs to an SFT term.
    """

    name: Literal["odds_ratio"]
    logprobs: Literal["mean"] = "mean"
    """Odds are of the mean."""

    @property
    def keeps_reference(self) -> bool:
        """It has none."""
        return False


class AnchoredLossConfig(PairLossBase):
    """Each answer against the reference (APO, D'Oosterlinck et al. 2024, arXiv 2408.06266).

    `zero` raises the chosen and lowers the rejected: `1 - sigmoid(beta x_chosen) + sigmoid(beta x_rejected)`.
    `down` lowers both, the rejected more: `sigmoid(beta x_chosen) + 1 - sigmoid(beta delta)`.
    """

    name: Literal["anchored"]
    anchor: Literal["zero", "down"] = "zero"
    """`zero` where chosen answers are better than the policy's own, `down` where they are worse."""


PairLossConfig = Annotated[
    LogisticLossConfig
    | RobustLossConfig
    | SquaredLossConfig
    | HingeLossConfig
    | OddsRatioLossConfig
    | AnchoredLossConfig,
    Field(discriminator="name"),
    default_variant(LogisticLossConfig),
]
