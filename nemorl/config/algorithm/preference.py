"""Learning from preferences: pairs of answers, or single ones that are good or not."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from nemorl.config.merge import merged

from .offline import OfflineBase
from .pair_loss import LogisticLossConfig, PairLossConfig
from .presets import Preset

# Each a setting of the parts below, laid under what an experiment says, as with online algorithms.
PREFERENCE_PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "dpo",
            "Direct preference optimisation",
            "https://arxiv.org/abs/2305.18290",
            {"loss": {"name": "logistic"}},
        ),
        Preset(
            "cdpo",
            "Conservative DPO: labels may be wrong",
            "https://ericmitchell.ai/cdpo.pdf",
            {"loss": {"name": "logistic", "label_smoothing": 0.1}},
        ),
        Preset(
            "robust_dpo",
            "DPO, unbiased under wrong labels",
            "https://arxiv.org/abs/2403.00409",
            {"loss": {"name": "robust", "label_smoothing": 0.1}},
        ),
        Preset(
            "ipo",
            "Identity preference optimisation",
            "https://arxiv.org/abs/2310.12036",
            {"loss": {"name": "squared"}},
        ),
        Preset(
            "hinge",
            "Hinge loss relative to a reference (RSO)",
            "https://arxiv.org/abs/2309.06657",
            {"loss": {"name": "hinge"}},
        ),
        Preset(
            "slic",
            "Sequence likelihood calibration",
            "https://arxiv.org/abs/2305.10425",
            {"loss": {"name": "hinge", "reference": False, "beta": 1.0}, "sft_coefficient": 0.1},
        ),
        Preset(
            "simpo",
            "Simple preference optimisation: means, no reference",
            "https://arxiv.org/abs/2405.14734",
            {
                "loss": {
                    "name": "logistic",
                    "reference": False,
                    "logprobs": "mean",
                    "beta": 2.0,
                    "gamma": 1.0,
                }
            },
        ),
        Preset(
            "cpo",
            "Contrastive preference optimisation",
            "https://arxiv.org/abs/2401.08417",
            {"loss": {"name": "logistic", "reference": False}, "sft_coefficient": 1.0},
        ),
        Preset(
            "orpo",
            "Odds ratio preference optimisation",
            "https://arxiv.org/abs/2403.07691",
            {"loss": {"name": "odds_ratio"}, "sft_coefficient": 1.0},
        ),
        Preset(
            "apo_zero",
            "Anchored: chosen answers are better than the policy's",
            "https://arxiv.org/abs/2408.06266",
            {"loss": {"name": "anchored", "anchor": "zero"}},
        ),
        Preset(
            "apo_down",
            "Anchored: chosen answers are worse than the policy's",
            "https://arxiv.org/abs/2408.06266",
            {"loss": {"name": "anchored", "anchor": "down"}},
        ),
    )
}

if TYPE_CHECKING:
    PreferenceName = str
else:
    PreferenceName = Literal[tuple(PREFERENCE_PRESETS)]


ReferenceTime = Literal["precomputed", "live"]


class PreferenceConfig(OfflineBase):
    """Raise the chosen answer of a pair over the rejected one."""

    name: PreferenceName
    loss: PairLossConfig = LogisticLossConfig()
    """What a pair costs."""
    sft_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean negative logprob of the chosen answers' tokens, added to the loss."""
    reference: ReferenceTime = "precomputed"
    """Compute the reference's logprobs once, before the first step, and keep their sums in the run folder; or
    keep its weights, and compute them in every step."""

    @model_validator(mode="before")
    @classmethod
    def _over_preset(cls, section: Any) -> Any:
        """What the experiment says, laid over the preset that it names."""
        if not isinstance(section, dict) or section.get("name") not in PREFERENCE_PRESETS:
            return section
        return merged(dict(PREFERENCE_PRESETS[section["name"]].settings), section)

    @property
    def sequences_per_update(self) -> int:
        """Two for each pair."""
        return 2 * self.batch_size

    @property
    def keeps_reference(self) -> bool:
        """Whether its weights stay beside the policy's."""
        return self.loss.keeps_reference and self.reference == "live"

    @property
    def precomputes_reference(self) -> bool:
        """Whether its logprobs are computed before the first step."""
        return self.loss.keeps_reference and self.reference == "precomputed"


class KtoConfig(OfflineBase):
    """Kahneman-Tversky optimisation of single answers (Ethayarajh et al. 2024, arXiv 2402.01306).

    `weight (1 - sigmoid(beta (x - z)))` of a good answer and `weight (1 - sigmoid(beta (z - x)))` of another,
    where x is its logprob relative to the reference and z the divergence from it, estimated in every step on
    prompts with answers to other prompts.
    """

    name: Literal["kto"]
    batch_size: int = Field(ge=2)
    """Examples of one step; each prompt is also joined to another's answer."""
    beta: float = Field(0.1, gt=0)
    """How much a difference of logprobs counts."""
    desirable_weight: float = Field(1.0, ge=0)
    """Of good answers. The paper: good and other answers, each times their weight, 1 to 1 up to 4 to 3."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Of the others."""
    reference: ReferenceTime = "precomputed"
    """Compute the reference's logprobs once, before the first step, of the answers and of those to other
    prompts that the steps will see; or keep its weights, and compute them in every step."""

    @property
    def sequences_per_update(self) -> int:
        """The batch."""
        return self.batch_size

    @property
    def keeps_reference(self) -> bool:
        """Whether its weights stay beside the policy's."""
        return self.reference == "live"

    @property
    def precomputes_reference(self) -> bool:
        """Whether its logprobs are computed before the first step."""
        return self.reference == "precomputed"
