"""Algorithms that learn from data: supervised fine-tuning, preferences, reward models."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemorl.config.base import Config, Variants, check
from nemorl.errors import Problem, Problems

from .base import TOTAL_LOSSES, Aggregation, AlgorithmBase, Preset, ValidationConfig
from .pair_losses import PREFERENCE_PRESETS, LogisticLossConfig, PairLossConfig

_OF_SAMPLING = ("num_generations_per_prompt", "pass_at_k", "cons_at_k", "pass_reward", "sampling")
_REWARD_METRICS = frozenset({"rewards/margin", "rewards/accuracy"})
PAIR_METRICS = _REWARD_METRICS | {
    *("loss/total", "loss/preference", "loss/sft", "rewards/chosen", "rewards/rejected"),
    *("logprobs/chosen", "logprobs/rejected"),
}
SFT_METRICS = frozenset({"loss/sft", "nll"})
ReferenceTime = Literal["precomputed", "live"]
TokenOrSequenceMean = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
PAIRS = "pairs of answers", ("preference", "arithmetic")
_JUDGED = "judged answers", ("feedback", "preference", "arithmetic")
_STEP_METRICS = frozenset({"loss/total", "accuracy", "score/margin"})


class LossValidationConfig(ValidationConfig):
    """The loss of the validation data; its tasks are sampled if configured."""

    unused_reason: ClassVar[str] = (
        "algorithm.validation.generate is false, so nothing is sampled; set it to true, or remove this"
    )
    generate: bool = False
    """Also sample the validation tasks and score the samples."""

    @check
    def _sampling_is_used(self) -> Problems:
        if not self.generate:
            yield from self.without_effect(_OF_SAMPLING, self.unused_reason)


class SampledValidationConfig(LossValidationConfig):
    generate: bool = True
    """Sample the validation tasks and score the samples; false computes the loss only."""


class OfflineBase(AlgorithmBase):
    takes_margins: ClassVar[bool] = False  # of pairs, if its loss uses them
    batch_size: int = Field(ge=1)
    """Examples of one step (pairs, if the data are pairs); an epoch has as many steps as batches fit."""
    validation: LossValidationConfig = LossValidationConfig()
    """Measuring on `data.validation`: the loss, and samples if configured."""

    @property
    def learns_from(self) -> tuple[str, tuple[str, ...]]:
        """What it learns from, in words, and the names of the datasets that have it."""
        return "answers", (
            "tasks",
            "jsonl",
            "generator",
            "reasoning_gym",
            "arithmetic",
            "conversations",
            "texts",
            "preference",
        )

    @property
    def loss_metrics(self) -> frozenset[str]:
        """Names of the metrics that its loss produces, for training and for validation data."""
        raise NotImplementedError

    @property
    def metrics(self) -> frozenset[str]:
        trained = self.loss_metrics
        names = super().metrics | trained | {"epoch"}
        names |= {"flops/reference"} if self.keeps_reference else set()
        if self.validation.scheduled:
            total = next(name for name in TOTAL_LOSSES if name in trained)
            measured = trained - {total, "kl/reference"}
            names |= {f"validation/{name}" for name in ("loss", *measured)} | {"time/validation"}
        return names

    @property
    def margin_scale(self) -> float:
        return getattr(getattr(self, "loss", None), "margin_scale", 0.0)

    @property
    def generates(self) -> bool:
        return self.validation.scheduled and self.validation.generate

    @property
    def units_per_update(self) -> int:
        return self.batch_size


class PreferenceConfig(OfflineBase):
    """Raise the chosen answer of a pair over the rejected one."""

    takes_margins: ClassVar[bool] = True
    sequences_per_unit: ClassVar[int] = 2
    presets: ClassVar[Mapping[str, Preset]] = PREFERENCE_PRESETS
    learns_from: ClassVar[tuple[str, tuple[str, ...]]] = PAIRS
    loss_metrics: ClassVar[frozenset[str]] = PAIR_METRICS
    name: Literal[tuple(PREFERENCE_PRESETS)]  # type: ignore[valid-type]
    loss: PairLossConfig = LogisticLossConfig()
    """The loss of a pair."""
    sft_coefficient: float = Field(0.0, ge=0)
    """Weight of the negative logprobs of the chosen answers' tokens, added to the loss."""
    sft_aggregation: TokenOrSequenceMean = "token-mean"
    """Their mean over the tokens of all chosen answers of a step, or the mean over answers of each one's mean
    or sum."""
    reference: ReferenceTime = "precomputed"
    """Compute the reference's logprobs once, before the first step, and keep their sums in the run folder; or
    keep its weights, and compute them in every step."""

    @property
    def keeps_reference(self) -> bool:
        return self.loss.keeps_reference and self.reference == "live"

    @property
    def precomputes_reference(self) -> bool:
        return self.loss.keeps_reference and self.reference == "precomputed"

    @check
    def _settings_suit_the_loss(self) -> Problems:
        if not self.loss.keeps_reference:
            reason = f"the loss `{self.loss.name}` has no reference here; remove this"
            yield from self.without_effect(("reference",), reason)
        if not self.sft_coefficient:
            reason = "sft_coefficient is 0, so the loss has no such term; set it, or remove this"
            yield from self.without_effect(("sft_aggregation",), reason)
        yield from sft_problems(self.loss, self.sft_coefficient)


def sft_problems(loss: PairLossConfig, sft_coefficient: float) -> Problems:
    """Of a loss that is unstable without a cross entropy."""
    if loss.needs_sft and sft_coefficient == 0:
        fix = "both answers may become unlikely; add a cross entropy, as ORPO's 1, or use another loss"
        yield Problem("sft_coefficient", 0.0, fix)


class KtoConfig(OfflineBase):
    """Kahneman-Tversky optimization of single answers (Ethayarajh et al. 2024, arXiv 2402.01306).

    `weight (1 - sigmoid(beta (x - z)))` of a good answer and `weight (1 - sigmoid(beta (z - x)))` of another,
    where x is its logprob relative to the reference and z the divergence from it, estimated in every step on
    prompts with answers to other prompts.
    """

    learns_from: ClassVar[tuple[str, tuple[str, ...]]] = _JUDGED
    loss_metrics: ClassVar[frozenset[str]] = _REWARD_METRICS | {
        *("loss/preference", "kl/reference"),
        *("examples/desirable", "rewards/desirable", "rewards/undesirable"),
    }
    name: Literal["kto"]
    batch_size: int = Field(ge=2)
    """Examples of one step; each prompt is also joined to another's answer."""
    beta: float = Field(0.1, gt=0)
    """Scale of differences of logprobs."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of good answers. The paper: numbers of good and other answers, each times their weight, 1 to 1
    up to 4 to 3."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of the others."""
    reference: ReferenceTime = "precomputed"
    """Compute the reference's logprobs once, before the first step, of the answers and of those to other
    prompts that the steps will see; or keep its weights, and compute them in every step."""

    @property
    def keeps_reference(self) -> bool:
        return self.reference == "live"

    @property
    def precomputes_reference(self) -> bool:
        return self.reference == "precomputed"

    @check
    def _some_answer_counts(self) -> Problems:
        if self.desirable_weight == self.undesirable_weight == 0:
            fix = "algorithm.undesirable_weight is 0 too, so no answer counts; set at least one of them"
            yield Problem("desirable_weight", 0.0, fix)


class RewardLossBase(Config):
    """Losses of two answers' scores; the score of an answer is that of its last token."""

    of_steps: ClassVar[bool] = False  # judged steps of one answer, not two answers
    metrics: ClassVar[frozenset[str]] = _STEP_METRICS | {
        *("loss/preference", "loss/center", "score/chosen", "score/rejected")
    }
    center_coefficient: float = Field(0.0, ge=0)
    """Weight of `(chosen + rejected)^2`, which keeps scores around 0 (Eisenstein et al. 2023, arXiv
    2312.09244)."""

    @property
    def scale_of_margins(self) -> float:
        return getattr(self, "margin_scale", 0.0)


class BradleyTerryLossConfig(RewardLossBase):
    """`-log sigmoid(chosen - rejected - margin)` (Bradley and Terry 1952; margins as in arXiv 2307.09288)."""

    name: Literal["bradley_terry"] = "bradley_terry"
    margin_scale: float = Field(0.0, ge=0)
    """Required difference of the scores for each unit of the pair's margin, which `data.*.margin_key`
    names."""


class LogExpLossConfig(RewardLossBase):
    """`log(1 + exp(rejected - chosen))`: Bradley-Terry's without a margin, in its common form."""

    name: Literal["log_exp"]


class ProcessLossConfig(Config):
    """Binary cross entropy at the last token of each step (Lightman et al. 2023, arXiv 2305.20050).

    A label between 0 and 1 is the probability that the step is right (Wang et al. 2023, arXiv 2312.08935).
    """

    of_steps: ClassVar[bool] = True
    metrics: ClassVar[frozenset[str]] = _STEP_METRICS
    name: Literal["process"]
    aggregation: Literal["step-mean", "answer-mean"] = "step-mean"
    """The mean over all steps of a batch, or over its answers of the mean over the steps of each."""


RewardLossConfig = Annotated[
    BradleyTerryLossConfig | LogExpLossConfig | ProcessLossConfig, Variants(BradleyTerryLossConfig)
]


class RewardModelValidationConfig(LossValidationConfig):
    unused_reason: ClassVar[str] = "a reward model samples nothing; remove this"
    generate: Literal[False] = False
    """A model with a scalar head samples nothing."""


class RewardModelConfig(OfflineBase):
    """Train a model with `policy.head: scalar` to score answers, from pairs or from judged steps."""

    head: ClassVar[Literal["lm", "scalar"]] = "scalar"
    takes_margins: ClassVar[bool] = True
    name: Literal["reward_model"]
    loss: RewardLossConfig = BradleyTerryLossConfig()
    """The loss of scores."""
    validation: RewardModelValidationConfig = RewardModelValidationConfig()
    """Measuring on `data.validation`: loss and accuracy over its pairs or steps."""

    @property
    def sequences_per_update(self) -> int:
        return self.batch_size * (1 if self.loss.of_steps else 2)

    @property
    def learns_from(self) -> tuple[str, tuple[str, ...]]:
        return ("judged steps", ("steps", "arithmetic")) if self.loss.of_steps else PAIRS

    @property
    def loss_metrics(self) -> frozenset[str]:
        return self.loss.metrics


class SftConfig(OfflineBase):
    """Supervised fine-tuning on the answers of the training tasks, or on every turn of conversations."""

    loss_metrics: ClassVar[frozenset[str]] = SFT_METRICS
    name: Literal["sft"]
    train_on: Literal["completion", "all"] = "completion"
    """Train on the tokens of the assistant, or on all tokens."""
    aggregation: Aggregation = "token-mean"
    """How per-token losses are aggregated."""
    validation: SampledValidationConfig = SampledValidationConfig()
    """Measuring on `data.validation`: the loss where it has answers, and samples."""
