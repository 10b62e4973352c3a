"""What algorithms share that learn from data as it stands.

Learning from preferences: pairs of answers, or single ones that are good or not.

Reward models: one number for an answer, or for each step of it.

Supervised fine-tuning.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from nemorl.config.base import Config, default_variant
from nemorl.config.yaml import merged

from .base import Aggregation, AlgorithmBase, ValidationConfig
from .losses import LogisticLossConfig, PairLossConfig
from .presets import PREFERENCE_PRESETS


class LossValidationConfig(ValidationConfig):
    """The loss of the validation data; its tasks are sampled where that is asked for."""

    generate: bool = False
    """Also sample the validation tasks and score what was sampled."""


class SampledValidationConfig(LossValidationConfig):
    """The loss of the validation data, and samples of its tasks."""

    generate: bool = True
    """Sample the validation tasks and score what was sampled; false computes the loss only."""


class OfflineBase(AlgorithmBase):
    """Examples in their order, a batch in each step."""

    batch_size: int = Field(ge=1)
    """Examples of one step (pairs, where the data are pairs); an epoch has as many steps as batches fit."""
    validation: LossValidationConfig = LossValidationConfig()
    """Measuring on `data.validation`: the loss, without sampling, and samples where asked for."""

    @property
    def generates(self) -> bool:
        """For validation only, and only where it says so."""
        return self.validation.scheduled and self.validation.generate

    @property
    def precomputes_reference(self) -> bool:
        """Whether the reference's logprobs are computed before the first step."""
        return False

    @property
    def units_per_update(self) -> int:
        """The batch; the sequences of one example go together."""
        return self.batch_size


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


class RewardLossBase(Config):
    """What losses of two answers' scores share; the score of an answer is that of its last token."""

    center_coefficient: float = Field(0.0, ge=0)
    """Weight of `(chosen + rejected)^2`, which keeps scores around 0 (Eisenstein et al. 2023, arXiv
    2312.09244)."""


class BradleyTerryLossConfig(RewardLossBase):
    """`-log sigmoid(chosen - rejected - margin)` (Bradley and Terry 1952; margins as in arXiv 2307.09288)."""

    name: Literal["bradley_terry"] = "bradley_terry"
    margin_scale: float = Field(0.0, ge=0)
    """The pair's own margin, which `data.*.margin_key` names, times this has to lie between its scores."""


class LogExpLossConfig(RewardLossBase):
    """`log(1 + exp(rejected - chosen))`: Bradley-Terry's without a margin, as it is often written."""

    name: Literal["log_exp"]


class ProcessLossConfig(Config):
    """Binary cross entropy at the last token of each step (Lightman et al. 2023, arXiv 2305.20050).

    A label between 0 and 1 is the probability that the step is right (Wang et al. 2023, arXiv 2312.08935).
    """

    name: Literal["process"]
    aggregation: Literal["step-mean", "answer-mean"] = "step-mean"
    """The mean over all steps of a batch, or over its answers of the mean over the steps of each."""


RewardLossConfig = Annotated[
    BradleyTerryLossConfig | LogExpLossConfig | ProcessLossConfig,
    Field(discriminator="name"),
    default_variant(BradleyTerryLossConfig),
]


class RewardModelValidationConfig(LossValidationConfig):
    """Loss and accuracy on the validation data."""

    generate: Literal[False] = False
    """A model with a scalar head samples nothing."""


class RewardModelConfig(OfflineBase):
    """Train a model with `policy.head: scalar` to score answers, from pairs or from judged steps."""

    name: Literal["reward_model"]
    loss: RewardLossConfig = BradleyTerryLossConfig()
    """What scores cost."""
    validation: RewardModelValidationConfig = RewardModelValidationConfig()
    """Measuring on `data.validation`: loss, and the share of its pairs or steps that are told right."""

    @property
    def sequences_per_update(self) -> int:
        """Two for each pair, one for each answer in steps."""
        return self.batch_size if isinstance(self.loss, ProcessLossConfig) else 2 * self.batch_size


class SftConfig(OfflineBase):
    """Supervised fine-tuning on the answers of the training tasks, or on every turn of conversations."""

    name: Literal["sft"]
    train_on: Literal["completion", "all"] = "completion"
    """Learn the tokens of the assistant, or all tokens."""
    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number."""
    validation: SampledValidationConfig = SampledValidationConfig()
    """Measuring on `data.validation`: the loss where it has answers, and samples."""

    @property
    def sequences_per_update(self) -> int:
        """The batch."""
        return self.batch_size
