"""Learning from a teacher, on samples of the policy or on data; and from the best of the policy's samples."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemorl.config.base import ADVANCED, EXPERT, Config, Variants, check
from nemorl.errors import Problem, Problems

from .base import Aggregation
from .offline import PAIR_METRICS, SFT_METRICS, OfflineBase, SampledValidationConfig, sft_problems
from .online import POLICY_METRICS, CorrectionConfig, MinibatchesBase, NoCorrectionConfig, OnlineBase
from .pair_losses import LogisticLossConfig, PairLossConfig


class DivergenceBase(Config):
    """Losses that may compare the teacher's most likely tokens; these are `tokens` of each subclass."""

    of_top: ClassVar[frozenset[str]] = frozenset({"distillation/forward_kl", "distillation/covered"})
    scales_teacher: ClassVar[bool] = False  # to the compared tokens, before its logprobs are averaged
    rest: Literal["one_outcome", "leave_out", "zero", "unscaled"] = "one_outcome"
    """All other tokens. `one_outcome`: they count together as one more. `leave_out`: both distributions are
    scaled to sum to 1 without them. `zero`: the teacher's probability of them is 0, and its others are scaled
    to sum to 1. `unscaled`: their terms are left out and nothing is scaled; a negative sum counts as 0."""
    max_value: float | None = Field(None, gt=0, json_schema_extra=EXPERT)
    """A token's divergence is clamped to this, without a gradient beyond; null does not clamp. Of `k1` of
    sampled tokens the factor of the gradient is clamped too, which null clamps to 20."""

    @check
    def _policy_cannot_avoid_the_tokens(self) -> Problems:
        if self.rest == "unscaled" and getattr(self, "name", "") != "forward_kl":
            reason = "a policy that gives the teacher's tokens no probability would have no divergence"
            yield Problem("rest", "unscaled", f"{reason}; use `one_outcome`, `zero` or `forward_kl`")


class TopLossBase(DivergenceBase):
    """Losses over the teacher's most likely tokens."""

    metrics: ClassVar[frozenset[str]] = DivergenceBase.of_top
    tokens: int = Field(32, ge=1)
    """Their number at each position, at most the vocabulary."""

    @property
    def top_k(self) -> int | None:
        """Tokens of the teacher that are compared at each position."""
        return self.tokens


class ReverseKlLossConfig(DivergenceBase):
    """KL(policy || teacher), from each sampled token alone or over the teacher's most likely tokens."""

    name: Literal["reverse_kl"] = "reverse_kl"
    tokens: int | None = Field(None, ge=1)
    """The teacher's most likely tokens that are compared at each position; null compares the sampled one."""
    estimator: Literal["k1", "k2", "k3"] = Field("k1", json_schema_extra=EXPERT)
    """The estimate from a sampled token. `k1` has the gradient of `k2`, which is that of the divergence; that
    of `k3` is of KL(teacher || policy) in expectation (docs/distillation.md)."""

    @property
    def top_k(self) -> int | None:
        return self.tokens

    @property
    def metrics(self) -> frozenset[str]:
        return frozenset({"distillation/reverse_kl"}) | (
            self.of_top if self.tokens is not None else frozenset()
        )

    @check
    def _settings_have_an_effect(self) -> Problems:
        if self.tokens is None:
            reason = "the sampled token alone is compared; set tokens, or remove this"
            yield from self.without_effect(("rest",), reason)
        else:
            reason = "the divergence is summed over tokens, not estimated; remove this, or set tokens to null"
            yield from self.without_effect(("estimator",), reason)


class ForwardKlLossConfig(TopLossBase):
    """KL(teacher || policy)."""

    name: Literal["forward_kl"]
    min_logprob: float | None = Field(None, lt=0, json_schema_extra=EXPERT)
    """Lower logprobs of policy and teacher count as this, without a gradient (verl); with rest `unscaled`."""

    @check
    def _clamped_logprobs_are_not_scaled(self) -> Problems:
        if self.rest != "unscaled":
            reason = "clamped logprobs do not sum to 1; set rest to `unscaled`, or remove this"
            yield from self.without_effect(("min_logprob",), reason)


class MixedKlLossConfig(TopLossBase):
    """`forward_weight KL(teacher || policy) + (1 - forward_weight) KL(policy || teacher)`."""

    metrics: ClassVar[frozenset[str]] = TopLossBase.metrics | {
        *("distillation/reverse_kl", "distillation/mixed_kl"),
    }
    name: Literal["mixed_kl"]
    forward_weight: float = Field(0.5, gt=0, lt=1)
    """Weight of the forward divergence."""


class JsdLossConfig(TopLossBase):
    """Generalized Jensen-Shannon divergence (GKD, Agarwal et al. 2023, arXiv 2306.13649).

    `beta KL(teacher || m) + (1 - beta) KL(policy || m)` with `m = beta teacher + (1 - beta) policy`.
    """

    metrics: ClassVar[frozenset[str]] = TopLossBase.metrics | {"distillation/jsd"}
    name: Literal["jsd"]
    beta: float = Field(0.5, gt=0, lt=1)
    """Divided by `beta (1 - beta)` it converges to the forward KL as beta goes to 0, to the reverse for 1."""


TopLossConfig = Annotated[
    ForwardKlLossConfig | ReverseKlLossConfig | MixedKlLossConfig | JsdLossConfig,
    Field(discriminator="name"),
]
DistillationLossConfig = Annotated[
    ReverseKlLossConfig | ForwardKlLossConfig | MixedKlLossConfig | JsdLossConfig,
    Variants(ReverseKlLossConfig),
]


class OnPolicyDistillationConfig(MinibatchesBase):
    """The policy samples and teachers score its tokens; rewards are metrics only."""

    keeps_teachers: ClassVar[bool] = True
    compares_all_tokens: ClassVar[bool] = True
    name: Literal["on_policy_distillation"]
    loss: DistillationLossConfig = ReverseKlLossConfig()
    """The divergence of policy and teacher."""
    aggregation: Aggregation = "token-mean"
    """How divergences of tokens are aggregated."""
    correction: CorrectionConfig = Field(NoCorrectionConfig(), json_schema_extra=ADVANCED)
    """How sampled tokens of another policy than the trained one are weighed or left out, with `reverse_kl`
    of the sampled token (MOPD, arXiv 2601.02780)."""
    teacher_key: str | None = None
    """Column of the tasks that names the teacher of each, if `teachers` has several."""

    @property
    def corrects_age(self) -> bool:
        return self.correction.weighs

    @property
    def needs_old_logprobs(self) -> bool:
        """True if weights are of the policy before the first of several updates."""
        decoupled = self.correction.form == "decoupled"
        return self.num_minibatches > 1 and self.correction.compares and decoupled

    @property
    def needs_rewards(self) -> bool:
        return self.validation.scheduled

    @property
    def metrics(self) -> frozenset[str]:
        return super().metrics | {
            *(*POLICY_METRICS, *self.loss.metrics, "time/teachers"),
            *self.correction.metrics,
        }

    @check
    def _correction_has_what_it_weighs(self) -> Problems:
        correction = self.correction
        if correction.changes_terms and self.loss.top_k is not None:
            fix = "it weighs the sampled token, and the loss is of the teacher's; remove it"
            yield Problem("correction", correction.model_dump(exclude_defaults=True), fix)
        elif correction.off_policy_threshold is not None:
            fix = "it leaves out sequences of negative advantage, and there is no advantage; remove it"
            yield Problem("correction.off_policy_threshold", correction.off_policy_threshold, fix)
        elif correction.divisor == "kept":
            fix = "the divergence of all sampled tokens is divided by their number; use `all`"
            yield Problem("correction.divisor", "kept", fix)
        elif correction.normalize:
            fix = "in distillation weights are not divided by their mean; remove this"
            yield Problem("correction.normalize", True, fix)
        elif correction.form == "bypass" and not correction.changes_terms:
            fix = "nothing is weighed or left out; remove it, or use `tis`"
            yield Problem("correction.form", "bypass", fix)


class DistillationConfig(OfflineBase):
    """The answers of the training data, with the teacher's distribution at each of their tokens."""

    keeps_teachers: ClassVar[bool] = True
    name: Literal["distillation"]
    loss: TopLossConfig = ForwardKlLossConfig(name="forward_kl")
    """The divergence of policy and teacher."""
    train_on: Literal["completion", "all"] = "completion"
    """Train on the tokens of the assistant, or on all tokens."""
    aggregation: Aggregation = "token-mean"
    """How divergences of tokens are aggregated."""
    teacher_key: str | None = None
    """Column of the tasks that names the teacher of each, if `teachers` has several."""
    validation: SampledValidationConfig = SampledValidationConfig()
    """Measuring on `data.validation`: the loss where it has answers, and samples."""

    @property
    def loss_metrics(self) -> frozenset[str]:
        return self.loss.metrics | {"loss/total", "entropy"}

    @check
    def _answers_are_not_samples(self) -> Problems:
        if self.loss.top_k is None:
            fix = "the estimate is of tokens that the policy samples, and the answers are data; set it"
            yield Problem("loss.tokens", None, f"{fix}, such as to 32")


class PickedBase(OnlineBase):
    """Algorithms that select one or two samples of each task by their reward."""

    trained_metrics: ClassVar[frozenset[str]] = SFT_METRICS
    num_generations_per_prompt: int = Field(ge=2)
    """Samples of each task, from which one or two are selected by their reward."""
    num_epochs: int = Field(1, ge=1)
    """Updates on the samples that a step selected."""

    @property
    def metrics(self) -> frozenset[str]:
        return super().metrics | self.trained_metrics | {"picked"}

    @property
    def units_per_update(self) -> int:
        return self.num_prompts_per_step


class IterativePreferenceConfig(PickedBase):
    """The best and the worst sample of each task are a pair (Xu et al. 2023, arXiv 2312.16682; Dong et al.
    2024, arXiv 2405.07863). A task whose samples have equal rewards has none.
    """

    trained_metrics: ClassVar[frozenset[str]] = PAIR_METRICS
    sequences_per_unit: ClassVar[int] = 2
    name: Literal["iterative_dpo"]
    loss: PairLossConfig = LogisticLossConfig()
    """The loss of a pair; its margin is the difference of the rewards."""
    sft_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean negative logprob of the chosen samples' tokens, added to the loss."""

    @property
    def keeps_reference(self) -> bool:
        return self.loss.keeps_reference

    @property
    def min_members(self) -> int:
        return 2

    @check
    def _loss_has_its_sft_term(self) -> Problems:
        yield from sft_problems(self.loss, self.sft_coefficient)


class RejectionSamplingConfig(PickedBase):
    """Imitate the best sample of each task (RAFT, Dong et al. 2023, arXiv 2304.06767; best of n)."""

    name: Literal["rejection_sampling"]
    min_reward: float | None = None
    """Samples with a lower reward are not imitated, even if they are the best of their task."""
