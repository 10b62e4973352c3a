"""Reward models: one number for an answer, or for each step of it."""

from typing import Annotated, Literal

from pydantic import Field

from nemorl.config.base import Config, default_variant

from .offline import LossValidationConfig, OfflineBase


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
