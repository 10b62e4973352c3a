"""Algorithms that learn from what the policy samples: one section, of which each algorithm is a preset."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemorl.config.base import ADVANCED, EXPERT, SIMPLE, Config, FieldLevel, Variants, check
from nemorl.config.run import ClusterConfig
from nemorl.errors import Problem, Problems

from . import advantages, losses
from .advantages import AdvantageConfig, GroupAdvantageConfig, PassAtKAdvantageConfig
from .base import AlgorithmBase, Preset, of_stage
from .losses import ClipLossConfig, CriticLearningConfig, PolicyLossConfig

DROPPED_METRICS = (
    *(f"dropped/{reason}" for reason in ("too_old", "aborted", "cut_off", "deadline", "lost", "discarded")),
    "dropped/failed",
    *("dropped/given_up", "dropped/late", "dropped/tokens", "dropped/length", "dropped/length_ratio"),
    *("dropped/reward", "dropped/reward_gap", *(f"dropped/share_q{quarter}" for quarter in range(1, 5))),
)
_SEND_STAGES = ("connect", "wait", "pack", "fingerprint", "encode")
_RECEIVE_STAGES = ("connect", "wait", "read", "copy", "fingerprint", "load")
REFIT_METRICS = (
    *("time/refit", "refit/gigabytes", "refit/gigabytes_per_second", "refit/seconds/commit"),
    *("refit/max_gigabytes_sent", "refit/max_gigabytes_received"),
    *(f"refit/seconds/send_{stage}" for stage in _SEND_STAGES),
    *(f"refit/seconds/receive_{stage}" for stage in _RECEIVE_STAGES),
)
POLICY_METRICS = ("loss/total", "entropy", "logprob_gap/k1", "logprob_gap/k3")
DROPPED = "sampling/dropped"  # share of the sampled tokens that the filters drop with the trainer's logits
Level = Literal["token", "sequence", "geometric"]


class EntropyBonusConfig(Config):
    """A fixed weight, for each token as the loss weighs it."""

    metrics: ClassVar[frozenset[str]] = frozenset()
    name: Literal["bonus"] = "bonus"
    coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy that is added to the objective."""


class AdaptiveEntropyConfig(Config):
    """A weight that grows while the entropy is below a target (Skywork-OR1, He et al. 2025, 2505.22312)."""

    metrics: ClassVar[frozenset[str]] = frozenset({"entropy/coefficient"})
    name: Literal["adaptive"]
    target: float = Field(0.2, gt=0)
    """Mean entropy per token, in nats, below which the bonus is added."""
    initial: float = Field(0.0, ge=0)
    """Weight of the first step."""
    change: float = Field(0.005, gt=0)
    """Added to the weight in a step below the target, and subtracted above it."""
    max_coefficient: float = Field(1.0, gt=0)
    """The weight stays between 0 and this."""

    @check
    def _initial_is_allowed(self) -> Problems:
        if self.initial > self.max_coefficient:
            fix = f"it must be at most algorithm.entropy.max_coefficient, {self.max_coefficient:g}"
            yield Problem("initial", self.initial, fix)


EntropyConfig = Annotated[EntropyBonusConfig | AdaptiveEntropyConfig, Variants(EntropyBonusConfig)]


class RefillConfig(Config):
    """Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476): replace dropped groups by new ones."""

    field_level: ClassVar[FieldLevel] = "expert"
    max_batches: int = Field(10, ge=2)
    """A step samples at most this many times `num_prompts_per_step` groups."""
    at_cap: Literal["fewer", "stop"] = "fewer"
    """If these are not enough: train on fewer groups, or stop the run with the reason."""


class FiltersConfig(Config):
    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal: their advantages are 0."""
    min_mean_reward: float | None = None
    """Drop groups whose mean reward is less."""
    max_mean_reward: float | None = None
    """Drop groups whose mean reward is more."""
    reward: str | None = None
    """Name of the reward by which groups are dropped; the weighted sum when not given."""
    refill: RefillConfig | None = None
    """Sample other groups for those dropped by the fields above; without it a step has fewer."""
    keep_most_varied: float | None = Field(None, gt=0, lt=1)
    """Train only on this share of a batch's groups, those whose rewards vary most (StarPO-S)."""
    drop_truncated: bool = False
    """Do not train on trajectories that a token limit ended; their reward counts in their group."""

    @property
    def drops_groups(self) -> bool:
        """True if groups are dropped independently of the rest of their batch."""
        return self.drop_equal_rewards or self.min_mean_reward is not None or self.max_mean_reward is not None

    @property
    def active(self) -> bool:
        return self.drops_groups or self.keep_most_varied is not None or self.drop_truncated

    @property
    def metrics(self) -> Iterator[str]:
        if self.active:
            yield from ("filters/sampled", "filters/kept")
        if self.drop_equal_rewards:
            yield "filters/dropped_equal_rewards"
        if self.min_mean_reward is not None or self.max_mean_reward is not None:
            yield "filters/dropped_mean_reward"
        if self.keep_most_varied is not None:
            yield "filters/least_varied"
        if self.drop_truncated:
            yield "filters/truncated"

    @check
    def _something_is_dropped(self) -> Problems:
        dropping = "drop_equal_rewards, min_mean_reward or max_mean_reward"
        if not self.drops_groups:
            reason = f"no group is dropped that another could replace; set one of {dropping}, or remove this"
            yield from self.without_effect(("refill",), reason)
        if not self.drops_groups and self.keep_most_varied is None:
            reason = f"no group is dropped by it; set one of {dropping} or keep_most_varied, or remove this"
            yield from self.without_effect(("reward",), reason)
        low, high = self.min_mean_reward, self.max_mean_reward
        if low is not None and high is not None and low > high:
            fix = f"no group would be left; set it to at most algorithm.filters.max_mean_reward, {high:g}"
            yield Problem("min_mean_reward", low, fix)


class TruncatedRewardConfig(Config):
    """ProRL's penalty for answers that do not stop (arXiv 2507.12507)."""

    scale: float | None = Field(None, ge=0, le=1)
    """Factor of the reward."""
    value: float | None = None
    """The reward instead of what it was."""

    @check
    def _one_is_given(self) -> Problems:
        if self.scale is None and self.value is None:
            yield Problem("scale", None, "nothing changes without it; set it, such as to 0, or set value")
        elif self.scale is not None and self.value is not None:
            yield Problem("value", self.value, "scale is set too; remove one of the two")


class OnlineBase(AlgorithmBase):
    online: ClassVar[bool] = True
    compares_all_tokens: ClassVar[bool] = False  # with a distribution of another model
    num_prompts_per_step: int = Field(ge=1)
    """Tasks sampled in a step."""
    num_generations_per_prompt: int = Field(ge=1)
    """Trajectories of each task, a group."""
    max_staleness: int = Field(0, ge=0)
    """Steps by which the weights that sampled may be older than those that train: 0 samples and trains by
    turns, 1 samples one step ahead, more is fully asynchronous. Engines on the policy's devices always take
    turns, and more than 0 lets groups continue after a step. With 0, the default, a resumed run gives the
    results of the uninterrupted one."""
    oversampling: float = Field(1.0, ge=1, json_schema_extra=EXPERT)
    """Groups that are started for a step, as a multiple of `num_prompts_per_step`; it trains on the first to
    finish (docs/asynchronous.md)."""
    group_seconds: float | None = Field(None, gt=0, json_schema_extra=EXPERT)
    """Seconds for the trajectories of a group; those that take longer end without being trained on, and so
    does the group if too few of it are left for the algorithm. null sets no limit."""
    filters: FiltersConfig = FiltersConfig()
    """Samples that are left out of training."""
    truncated_reward: TruncatedRewardConfig | None = None
    """The reward with which trajectories train that a token limit ended; null leaves it as it is. Filters and
    metrics use the reward as it was given."""
    max_logprob_gap: float = Field(0.2, gt=0, json_schema_extra=EXPERT)
    """Stop if the mean absolute difference between the engine's and the trainer's logprobs is larger. Each
    update since the tokens were sampled allows as much again."""
    max_token_logprob_gap: float | None = Field(None, gt=0, json_schema_extra=EXPERT)
    """Stop if that difference is larger at any token; null does not check it."""
    logprob_gap_period: int | None = Field(None, ge=1, json_schema_extra=EXPERT)
    """Steps between comparisons before an update, each a forward pass; the first batch always has one."""

    @property
    def metrics(self) -> frozenset[str]:
        return super().metrics | {
            *("reward/mean", "reward/std", "group/zero_variance", "length/mean", "turns/mean", "errors"),
            *("environment/errors", "environment/retries", "environment/truncated"),
            *("trajectory_seconds/generation", "trajectory_seconds/environment"),
            *("tokens/generated", "version/lag", "throughput/generated_tokens_per_second"),
            *of_stage("generation"),
            *of_stage("logprobs"),
            *(of_stage("reference") if self.keeps_reference else ()),
            *(f"stop/{reason}" for reason in ("stop", "length", "tool_calls", "abort", "deadline", "error")),
            *("time/generation", "time/environment", "time/loading", "time/logprobs", "time/reference"),
            "time/recording",
            *(f"generation/replicas{what}" for what in ("", "_lost", "_restarted", "_joined", "_left")),
            *(f"rollout/workers{what}" for what in ("", "_lost", "_restarted")),
            *("rollout/restarts_failed", *DROPPED_METRICS),
            *("generation/restarts_failed", "generation/requests_moved", "generation/tokens_kept"),
            *("generation/concurrency", "generation/in_flight", "generation/queued"),
            *("generation/prompt_cached", "generation/drafts_accepted"),
            *("generation/requests_failed", "generation/retries", "logprob_gap/mean", "logprob_gap/max"),
            *(*REFIT_METRICS, *self.filters.metrics, "version/lag_max", "version/spread"),
        }

    @property
    def extra_groups(self) -> int:
        """Groups started for a step besides those that it trains on."""
        size = self.num_prompts_per_step
        return math.ceil(round(self.oversampling * size, 6)) - size

    @property
    def min_members(self) -> int:
        """Finished trajectories that a group needs to be trained on."""
        return 1

    @property
    def ages(self) -> range:
        """Ages of samples with metrics of their own; older ones count as the last."""
        return range(min(self.max_staleness, 8) + 1 if self.max_staleness else 0)

    @property
    def corrects_age(self) -> bool:
        """True if the loss weights tokens for samples of other weights than the trained ones."""
        return False

    @property
    def trajectories_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def greedy_baseline(self) -> bool:
        """True if a greedy sample of each task is drawn in addition to its group."""
        return False

    @check
    def _settings_have_an_effect(self) -> Problems:
        if self.num_generations_per_prompt == 1:
            reason = "in a group of one all rewards are equal; raise num_generations_per_prompt, or remove it"
            names = ("drop_equal_rewards", "keep_most_varied")
            yield from self.filters.without_effect(names, reason, "filters.")

    @check
    def _long_tails_are_bounded(self, cluster: ClusterConfig) -> Problems:
        refill, deadline = self.filters.refill, cluster.deadlines.generation
        if refill is not None and self.oversampling > refill.max_batches:
            fix = f"a step samples at most algorithm.filters.refill.max_batches, {refill.max_batches}, times"
            yield Problem("oversampling", self.oversampling, f"{fix} num_prompts_per_step; lower it")
        if self.group_seconds is not None and self.group_seconds >= deadline:
            fix = f"the run ends after cluster.deadlines.generation, {deadline:g}, without a finished group"
            yield Problem("group_seconds", self.group_seconds, f"{fix}; set it to less")


class MinibatchesBase(OnlineBase):
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps that share the batch of one step; divides the number of trajectories. With 1 every
    update is of the policy that sampled."""

    @property
    def units_per_update(self) -> int:
        return self.trajectories_per_step // self.num_minibatches

    @property
    def described_trajectories(self) -> str:
        return (
            f"{self.trajectories_per_step} trajectories "
            f"({self.num_prompts_per_step} prompts x {self.num_generations_per_prompt} generations)"
        )

    @check
    def _minibatches_divide(self) -> Problems:
        if self.trajectories_per_step % self.num_minibatches:
            fix = f"it must divide the {self.described_trajectories} of a step"
            yield Problem("num_minibatches", self.num_minibatches, fix)


class SequenceMaskConfig(Config):
    """Leave sequences out by the ratios of their tokens, trainer over engine."""

    field_level: ClassVar[FieldLevel] = "expert"
    low: float | None = Field(None, gt=0, lt=1)
    """A sequence counts when the geometric mean of its ratios is at least this."""
    high: float | None = Field(None, gt=1)
    """A sequence counts when the geometric mean of its ratios is at most this."""
    max_difference: float | None = Field(None, gt=0)
    """A sequence counts when the logprobs of none of its tokens differ by more nats than this."""
    max_mean_factor: float | None = Field(None, gt=1)
    """A sequence counts when the mean factor between the probabilities of its tokens, the larger one over the
    smaller one, is at most this."""

    @check
    def _leaves_something_out(self) -> Problems:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            fix = "no sequence is left out; set one of its bounds, or set this to null"
            yield Problem("", {}, fix)


class CorrectionBase(Config):  # docs/off_policy.md has the formulas
    weighs: ClassVar[bool] = True  # tokens or sequences get weights
    bounds_leave_out: ClassVar[bool] = False  # weights out of bounds become 0
    weight_metric: ClassVar[str] = "correction/masked"  # share of weights out of bounds

    form: Literal["decoupled", "bypass"] = Field("decoupled", json_schema_extra=EXPERT)
    """Three policies, whose old one the trainer computes, or two: the engine's logprobs are the old ones."""
    sequence_mask: SequenceMaskConfig | None = None
    """Leave out sequences that engine and trainer see too differently."""
    off_policy_threshold: float | None = Field(None, gt=0, json_schema_extra=EXPERT)
    """Leave out sequences of negative advantage that became unlikelier by more nats per token than this."""
    divisor: Literal["all", "kept"] = Field("all", json_schema_extra=EXPERT)
    """What divides the loss: all sampled tokens, also those left out, which keep divergence and entropy; or,
    as in verl, those that the bounds of `mis` and `icepop` and `sequence_mask` keep: others have no term."""
    normalize: bool = Field(False, json_schema_extra=EXPERT)
    """Divide the weights of `tis`, `mis` or `icepop` by their mean over the step, of its tokens or, by level,
    of its sequences, with the policy before the updates. verl: `rollout_is_batch_normalize`."""

    @property
    def leaves_out(self) -> bool:
        """True if tokens may have no loss because old policy and engine differ."""
        return self.bounds_leave_out or self.sequence_mask is not None

    @property
    def compares(self) -> bool:
        """True if old policy and engine are compared for more than metrics."""
        return self.weighs or self.sequence_mask is not None

    @property
    def changes_terms(self) -> bool:
        """True if the loss of tokens may be weighed or left out."""
        return self.compares or self.off_policy_threshold is not None

    @property
    def metrics(self) -> Iterator[str]:
        if self.weighs:
            yield from (self.weight_metric, "correction/ratio_mean", "correction/ratio_max")
        if self.sequence_mask is not None:
            yield "correction/masked_sequences"
        if self.off_policy_threshold is not None:
            yield "correction/masked_off_policy"
        if self.changes_terms:
            yield from ("correction/mean", "correction/ess")

    @check
    def _bounds_are_in_order(self) -> Problems:
        if not self.weighs:
            return
        low, high = getattr(self, "low", 0.0), getattr(self, "high", 1.0)
        if low >= high:
            yield Problem("low", low, f"it must be less than algorithm.correction.high, {high:g}")
        elif low > 1 or high < 1:
            field, value, bound = ("low", low, "at most") if low > 1 else ("high", high, "at least")
            fix = f"set it to {bound} 1, the weight of a token on which engine and trainer agree"
            yield Problem(field, value, fix)

    @check
    def _weights_have_a_mean(self) -> Problems:
        if self.normalize and not self.weighs:
            fix = "there are no weights; remove this, or use `tis`, `mis` or `icepop`"
            yield Problem("normalize", True, fix)

    @check
    def _divisor_differs(self) -> Problems:
        if self.divisor == "kept" and self.form == "bypass":
            fix = "in the bypass form only the update shows what is left out; use `all`, or form `decoupled`"
            yield Problem("divisor", "kept", fix)
        elif self.divisor == "kept" and not self.leaves_out:
            fix = "no token is left out; remove this, use `mis` or `icepop`, or set sequence_mask"
            yield Problem("divisor", "kept", fix)


class NoCorrectionConfig(CorrectionBase):
    """No weights."""

    weighs: ClassVar[bool] = False
    name: Literal["none"] = "none"


class TruncatedCorrectionConfig(CorrectionBase):
    """Truncated importance sampling: weights are cut to the bounds."""

    weight_metric: ClassVar[str] = "correction/truncated"
    name: Literal["tis"]
    level: Level = "token"
    """The weight is of a token, of its sequence (product), or of its sequence's geometric mean."""
    low: float = Field(0.0, ge=0)
    """Smaller weights become this."""
    high: float = Field(2.0, gt=0)
    """Larger weights become this."""


class MaskedCorrectionConfig(CorrectionBase):
    """Masked importance sampling: leave out tokens or sequences of large weight."""

    low: ClassVar[float] = 0.0  # no lower bound
    bounds_leave_out: ClassVar[bool] = True
    name: Literal["mis"]
    level: Level = "token"
    """The weight is of a token, of its sequence (product), or of its sequence's geometric mean."""
    high: float = Field(2.0, gt=0)
    """Larger weights become 0."""


class IcePopCorrectionConfig(CorrectionBase):
    """IcePop: leave out small and large weights (Ling Team 2025, arXiv 2510.18855)."""

    bounds_leave_out: ClassVar[bool] = True
    name: Literal["icepop"]
    level: Level = "token"
    """The weight is of a token, of its sequence (product), or of its sequence's geometric mean."""
    low: float = Field(0.5, ge=0)
    """Smaller weights become 0."""
    high: float = Field(5.0, gt=0)
    """Larger weights become 0."""


CorrectionConfig = Annotated[
    NoCorrectionConfig | TruncatedCorrectionConfig | MaskedCorrectionConfig | IcePopCorrectionConfig,
    Variants(NoCorrectionConfig),
]


class KLConfig(Config):
    """docs/off_policy.md says which estimator gives which gradient."""

    coefficient: float = Field(0.0, ge=0, json_schema_extra=SIMPLE)
    """Weight of the divergence from the reference policy; 0 keeps no reference at all, and saves its memory
    and its pass."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence per token (Schulman, "Approximating KL divergence", 2020)."""
    placement: Literal["loss", "reward"] = "loss"
    """Add it to the loss, with its gradient, or subtract it from each token's reward."""
    straight_through: bool = Field(False, json_schema_extra=EXPERT)
    """In the loss: the value is the estimator's and the gradient k2's, which is that of the divergence."""
    importance_weighted: bool = Field(False, json_schema_extra=EXPERT)
    """In the loss: multiply by the ratio to the policy that sampled, so that stale samples do not bias it."""
    sampled_by: Literal["old", "engine", "current"] = Field("old", json_schema_extra=EXPERT)
    """The policy that this ratio takes for the one that sampled: the trainer's before the step, the engine's,
    or the current one, of which the ratio is 1 and only its gradient is left. NeMo-RL: `current`, and
    `engine` with its on-policy approximation."""
    max_log_ratio: float | None = Field(20.0, gt=0, json_schema_extra=EXPERT)
    """Clamp the log ratio of policy and reference, of which each estimate is, to ± this, without gradient
    beyond; null does not, and k3 may overflow."""
    max_value: float | None = Field(None, gt=0, json_schema_extra=EXPERT)
    """Clamp each token's estimate to ± this, without gradient beyond, also of k2's in `straight_through`;
    verl and OpenRLHF: 10."""

    @property
    def active(self) -> bool:
        return self.coefficient > 0

    @check
    def _estimator_has_a_gradient(self) -> Problems:
        """k1 in the loss has gradient 0 in expectation; in the reward the others have a wrong gradient."""
        if not self.active:
            return
        if self.placement == "reward":
            reason = "a reward has no gradient; use algorithm.kl.placement `loss`, or remove this"
            yield from self.without_effect(("straight_through", "importance_weighted"), reason)
            if self.estimator != "k1":
                fix = "in the reward only k1 has a gradient to the reference; use k1, or placement `loss`"
                yield Problem("estimator", self.estimator, fix)
        elif self.estimator == "k1" and not (self.straight_through or self.importance_weighted):
            fix = "in the loss the gradient of k1 is 0 in expectation; use k2 or k3, or straight_through"
            yield Problem("estimator", self.estimator, fix)
        if not self.importance_weighted:
            reason = "algorithm.kl.importance_weighted is false, so there is no ratio; set it, or remove this"
            yield from self.without_effect(("sampled_by",), reason)
        if self.straight_through and self.estimator == "k2":
            fix = "k2 has this gradient already; remove it, or use the value of k1 or k3"
            yield Problem("straight_through", True, fix)


class LikelihoodConfig(Config):
    """The likelihood of samples with a high reward (VAPO's positive-example loss, arXiv 2504.05118)."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of their mean negative logprob per token, added to the loss; 0.1 in the paper."""
    min_reward: float = 1.0
    """A trajectory is imitated if its reward is at least this."""

    @check
    def _something_is_imitated(self) -> Problems:
        if self.coefficient == 0:
            reason = "algorithm.likelihood.coefficient is 0, so nothing is imitated; raise it, or remove this"
            yield from self.without_effect(("min_reward",), reason)


PRESETS = dict(sorted((advantages.PRESETS | losses.PRESETS).items()))  # the named online algorithms


class AdvantageClipConfig(Config):
    """An advantage out of bounds becomes the nearer bound."""

    field_level: ClassVar[FieldLevel] = "expert"
    low: float | None = Field(None, le=0)
    """The smallest advantage; null has no bound."""
    high: float | None = Field(None, ge=0)
    """The largest advantage; null has no bound."""

    @check
    def _a_bound_is_set(self) -> Problems:
        if self.low is self.high is None:
            yield Problem("", {}, "no advantage is out of bounds; set `low` or `high`, or set this to null")


class OnlineConfig(MinibatchesBase):
    """Sample, score, train, update the weights."""

    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    reference_field: ClassVar[str | None] = "algorithm.kl.coefficient"
    trains_filtered: ClassVar[bool] = True
    name: Literal[tuple(PRESETS)]  # type: ignore[valid-type]
    num_epochs: int = Field(1, ge=1)
    """Passes over the batch of a step, in the same minibatches."""
    advantage: AdvantageConfig = GroupAdvantageConfig()
    """How rewards become advantages."""
    flagged_advantages: dict[str, float] = Field(default_factory=dict, json_schema_extra=EXPERT)
    """Advantages of the tokens of flagged turns, by names of `env.turn_flags`, in place of those of their
    samples; of a turn with several flags the first one here counts (docs/rewards.md)."""
    advantage_clip: AdvantageClipConfig | None = Field(None, json_schema_extra=EXPERT)
    """Bounds of the advantages, after all else; null has none."""
    compares: Literal["samples", "branches"] = Field("samples", json_schema_extra=EXPERT)
    """What has an advantage of its own. `branches`: each branch of a sample, such as a step of an agent that
    begins with a new prompt, by the rewards of its answers (docs/agents.md)."""
    loss: PolicyLossConfig = ClipLossConfig()
    """The policy's loss."""
    kl: KLConfig = KLConfig()
    """Divergence from the reference policy."""
    entropy: EntropyConfig = Field(EntropyBonusConfig(), json_schema_extra=ADVANCED)
    """The bonus for entropy."""
    likelihood: LikelihoodConfig = LikelihoodConfig()
    """The loss that imitates samples with a high reward."""
    correction: CorrectionConfig = Field(NoCorrectionConfig(), json_schema_extra=ADVANCED)
    """How samples of another policy than the trained one are weighed or left out."""
    critic: CriticLearningConfig | None = None
    """Training of a critic, for advantages that need one; the section `critic` says which model it is."""

    @property
    def metrics(self) -> frozenset[str]:
        per_token = self.advantage.per_token
        return super().metrics | {
            *(*POLICY_METRICS, DROPPED),
            *(f"staleness/{name}_{k}" for k in self.ages for name in ("share", "gap", "gap_max", "ess")),
            "loss/policy",
            *self.loss.metrics,
            *self.correction.metrics,
            *self.entropy.metrics,
            *(("reward/of_greedy",) if self.greedy_baseline else ()),
            *(("kl/reference",) if self.kl.active else ()),
            *(("loss/likelihood",) if self.likelihood.coefficient > 0 else ()),
            *(("top_entropy_fraction",) if self.loss.selects_by_entropy else ()),
            *(("advantage/mean", "advantage/std") if per_token else ()),
            *(("kl/penalty", "time/advantages") if per_token or self.kl_in_reward else ()),
            *((*self.critic.metrics, *of_stage("values")) if self.critic is not None else ()),
        }

    @property
    def keeps_reference(self) -> bool:
        return self.kl.active

    @property
    def updates_per_step(self) -> int:
        return self.num_minibatches * self.num_epochs

    @property
    def kl_in_reward(self) -> bool:
        """True if the divergence is subtracted from the rewards, and not added to the loss."""
        return self.kl.active and self.kl.placement == "reward"

    @property
    def kl_in_loss(self) -> bool:
        return self.kl.active and self.kl.placement == "loss"

    @property
    def greedy_baseline(self) -> bool:
        return self.advantage.needs_greedy_sample

    @property
    def min_members(self) -> int:
        return self.advantage.min_members

    @property
    def corrects_age(self) -> bool:
        return self.correction.weighs

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the policy's logprobs before the first update have to be computed.

        A single update sees the weights before it, so its own logprobs are the old ones, unless the loss
        selects among all tokens before it computes any, by covariance or by entropy, or is divided by those
        that the correction keeps or by the mean of its weights, or advantages take the old policy's
        probabilities. Several updates need the pass if a ratio, a weight or a mask is relative to the old
        policy; in the bypass form of the correction the engine's logprobs are the old ones.
        """
        of_kl = self.kl.importance_weighted and self.kl.sampled_by == "old"
        compared = self.loss.has_ratio or self.correction.compares or of_kl
        before_all = self.loss.selects_tokens or self.correction.divisor == "kept"
        needed = before_all or (self.updates_per_step > 1 and compared)
        in_all_forms = (
            self.kl_in_reward
            or self.loss.selects_by_entropy
            or self.advantage.needs_collisions
            or self.correction.normalize
        )
        return in_all_forms or (needed and self.correction.form == "decoupled")

    @check
    def _kl_settings_are_used(self) -> Problems:
        if self.kl.active:
            return
        by_preset = PRESETS[self.name].settings.get("kl", {})
        of_estimate = ("estimator", "straight_through", "importance_weighted", "sampled_by")
        for name in (*of_estimate, "max_log_ratio", "max_value"):
            value = getattr(self.kl, name)
            if value != by_preset.get(name, KLConfig.model_fields[name].default):
                fix = "algorithm.kl.coefficient is 0, so nothing is estimated; raise it, or remove this"
                yield Problem(f"kl.{name}", value, fix)

    @check
    def _loss_fits_the_other_parts(self) -> Problems:
        correction, loss = self.correction, self.loss
        decoupled = correction.form == "decoupled"
        if loss.acts_from_second_update and decoupled and self.updates_per_step == 1:
            fix = f"`{loss.name}` has no gradient in the first update of a step; set it to 2 or more"
            yield Problem("num_minibatches", self.num_minibatches, fix)
        if loss.per_sequence and (self.advantage.per_turn or self.flagged_advantages):
            given = "flagged_advantages" if self.flagged_advantages else f"`{self.advantage.name}`"
            fix = f"{given} has several advantages in a sequence; use `gspo_token` or `clip`"
            yield Problem("loss.name", loss.name, fix)
        if decoupled:
            return
        # In the bypass form a ratio corrects already; without one there must be something else to do.
        if correction.weighs and not correction.bounds_leave_out and loss.has_ratio:
            ratio = f"the ratio of `{loss.name}` is relative to the engine, and weighs each token"
            fix = f"in the bypass form {ratio}; use `mis` or `icepop`, or form `decoupled`"
            yield Problem("correction.name", correction.name, fix)
        if correction.normalize and loss.has_ratio:
            fix = f"in the bypass form the ratio of `{loss.name}` weighs tokens; remove this"
            yield Problem("correction.normalize", True, fix)
        if not correction.changes_terms and not loss.has_ratio:
            fix = f"`{loss.name}` has no ratio to the engine; remove it, or use `tis`"
            yield Problem("correction.form", correction.form, fix)

    @check
    def _groups_can_be_compared(self) -> Problems:
        members = self.num_generations_per_prompt
        if self.advantage.needs_group and members == 1 and self.compares == "samples":
            what, other = "advantage 0", "reinforce"
            if self.advantage.per_token:
                what, other = "no baseline", "token_returns"
            fix = f"a trajectory alone in its group has {what}; set it to 2 or more, or use `{other}`"
            yield Problem("num_generations_per_prompt", 1, fix)
        if isinstance(self.advantage, PassAtKAdvantageConfig) and 1 < members <= self.advantage.k:
            fix = f"in a group of {members} all sets of it have the same reward; use less, or larger groups"
            yield Problem("advantage.k", self.advantage.k, fix)

    @check
    def _old_policy_is_computed(self) -> Problems:
        if self.advantage.needs_collisions and self.correction.form == "bypass":
            reason = f"`{self.advantage.name}` takes probabilities of the old policy"
            fix = f"{reason}, which here is the engine and gives those of its tokens only; use `decoupled`"
            yield Problem("correction.form", "bypass", fix)

    @check
    def _branches_can_be_compared(self) -> Problems:
        name, advantage = self.advantage.name, self.advantage
        if self.compares == "branches" and (
            advantage.per_turn or advantage.needs_greedy_sample or not advantage.uses_reward_sum
        ):
            problem = f"`{name}` does not compare the sums of rewards of branches"
            yield Problem("compares", self.compares, f"{problem}; remove this, or use the advantage `group`")

    @check
    def _advantages_can_be_changed(self) -> Problems:
        if not self.advantage.per_token:
            return
        of_tokens = f"those of `{self.advantage.name}` are of tokens, which"
        if self.advantage_clip is not None:
            given = self.advantage_clip.model_dump(mode="json", exclude_unset=True)
            yield Problem("advantage_clip", given, f"{of_tokens} have no bounds; set this to null")
        if self.flagged_advantages:
            fix = f"{of_tokens} flags do not change; remove this, or use the advantage `group`"
            yield Problem("flagged_advantages", self.flagged_advantages, fix)

    @check
    def _divergence_reaches_advantages(self) -> Problems:
        if not self.kl_in_reward:
            return
        if not self.advantage.uses_reward_sum:
            name = self.advantage.name
            fix = f"`{name}` does not use the sum of rewards; set it to loss, or use another advantage"
            yield Problem("kl.placement", "reward", fix)
        if self.filters.drop_truncated and not self.advantage.per_token:
            fix = "dropped trajectories have no divergence for their reward; remove it, or use placement loss"
            yield Problem("filters.drop_truncated", True, fix)

    @check
    def _critic_is_needed(self) -> Problems:
        needs, name = self.advantage.needs_values, self.advantage.name
        if needs and self.critic is None:
            by_preset = "critic" in PRESETS[self.name].settings  # so null was written
            change = "remove this null" if by_preset else "set `algorithm.critic: {}`, or use `name: ppo`"
            fix = f"the advantage `{name}` needs the values of a critic; {change}"
            yield Problem("critic", None, f"{fix}, or use the advantage `token_returns` or `group`")
        elif not needs and self.critic is not None:
            fix = f"the advantage `{name}` uses no values; set this to null, or use `gae`"
            yield Problem("critic", self.critic.model_dump(mode="json", exclude_unset=True), fix)
        elif self.critic is not None and self.critic.warmup_steps >= self.num_steps:
            fix = f"the run has {self.num_steps} steps, so the policy would not be trained; set it to fewer"
            yield Problem("critic.warmup_steps", self.critic.warmup_steps, fix)
