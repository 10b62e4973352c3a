"""Losses of two answers to one prompt, of which one is better, and the algorithms named after them.

They compare logprobs of complete answers: `x = log policy` of an answer, less `log reference` if the loss has
a reference; `delta` is x of the chosen less x of the rejected.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemorl.config.base import Config, Variants

from .base import preset


class PairLossBase(Config):
    needs_sft: ClassVar[bool] = False  # unstable without a cross entropy of the chosen answers
    uses_reference: ClassVar[bool] = True  # unless its field `reference` is false
    beta: float = Field(0.1, gt=0)
    """Scale of differences of logprobs; of losses with a reference, the weight of staying near it."""
    logprobs: Literal["sum", "mean"] = "sum"
    """Of an answer's tokens: their sum, which is the answer's logprob, or their mean, free of its length."""

    @property
    def keeps_reference(self) -> bool:
        """True if logprobs are relative to the reference."""
        return getattr(self, "reference", self.uses_reference)


class LogisticLossConfig(PairLossBase):
    """`-log sigmoid(beta delta - gamma)` (DPO, Rafailov et al. 2023, arXiv 2305.18290).

    Without a reference and with means it is SimPO (Meng et al. 2024, arXiv 2405.14734); smoothed, cDPO
    (Mitchell 2023); with the data's margins, ODPO (Amini et al. 2024, arXiv 2402.10571).
    """

    name: Literal["logistic"] = "logistic"
    reference: bool = True
    """Take logprobs relative to the reference policy."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a label is wrong, and the weight of the reversed pair in the loss."""
    gamma: float = Field(0.0, ge=0)
    """Required margin of the chosen answer, in units of the loss's argument."""
    margin_scale: float = Field(0.0, ge=0)
    """Added to gamma for each unit of the pair's margin, which `data.*.margin_key` names."""


class RobustLossConfig(PairLossBase):
    """DPO's loss, unbiased under randomly wrong labels (Chowdhury et al. 2024, arXiv 2403.00409)."""

    name: Literal["robust"]
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Probability that a label is wrong."""


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
    """Required margin of the chosen answer; beyond it a pair has no gradient."""


class OddsRatioLossConfig(PairLossBase):
    """`-beta log sigmoid(log odds of the chosen - log odds of the rejected)` of mean logprobs.

    ORPO (Hong et al. 2024, arXiv 2403.07691; beta is its lambda); used with an SFT term.
    """

    needs_sft: ClassVar[bool] = True
    uses_reference: ClassVar[bool] = False
    name: Literal["odds_ratio"]
    logprobs: Literal["mean"] = "mean"
    """Odds are of the mean."""


class AnchoredLossConfig(PairLossBase):
    """Each answer against the reference (APO, D'Oosterlinck et al. 2024, arXiv 2408.06266).

    `zero` raises the chosen and lowers the rejected: `1 - sigmoid(beta x_chosen) + sigmoid(beta x_rejected)`.
    `down` lowers both, the rejected more: `sigmoid(beta x_chosen) + 1 - sigmoid(beta delta)`.
    """

    name: Literal["anchored"]
    anchor: Literal["zero", "down"] = "zero"
    """`zero` if chosen answers are better than the policy's, `down` if they are worse."""


_Margin = LogisticLossConfig | RobustLossConfig | SquaredLossConfig | HingeLossConfig
PairLossConfig = Annotated[_Margin | OddsRatioLossConfig | AnchoredLossConfig, Variants(LogisticLossConfig)]

_SMOOTHED = {"name": "logistic", "label_smoothing": 0.1}
_CALIBRATION = {"name": "hinge", "reference": False, "beta": 1.0}
_MEANS = {"name": "logistic", "reference": False, "logprobs": "mean", "beta": 2.0, "gamma": 1.0}
_PLAIN = {"name": "logistic", "reference": False}
_DOWN = {"name": "anchored", "anchor": "down"}
PREFERENCE_PRESETS = {
    "dpo": preset("Direct preference optimization", "2305.18290", "logistic"),
    "cdpo": preset("Conservative DPO: labels may be wrong", "https://ericmitchell.ai/cdpo.pdf", _SMOOTHED),
    "robust_dpo": preset("DPO, unbiased under wrong labels", "2403.00409", "robust"),
    "ipo": preset("Identity preference optimization", "2310.12036", "squared"),
    "hinge": preset("Hinge loss relative to a reference (RSO)", "2309.06657", "hinge"),
    "slic": preset("Sequence likelihood calibration", "2305.10425", _CALIBRATION, sft_coefficient=0.1),
    "simpo": preset("Simple preference optimization: means, no reference", "2405.14734", _MEANS),
    "cpo": preset("Contrastive preference optimization", "2401.08417", _PLAIN, sft_coefficient=1.0),
    "orpo": preset("Odds ratio preference optimization", "2403.07691", "odds_ratio", sft_coefficient=1.0),
    "apo_zero": preset("Anchored: chosen answers are better than the policy's", "2408.06266", "anchored"),
    "apo_down": preset("Anchored: chosen answers are worse than the policy's", "2408.06266", _DOWN),
}
