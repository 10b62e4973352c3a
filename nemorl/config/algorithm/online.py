"""Algorithms that learn from what the policy samples: one section, of which each algorithm is a preset.

What the policy's entropy is worth.

What of a batch does not train.

What algorithms share that sample in every step.

Samples of another policy than the one that learns: other arithmetic, older weights, several updates.

docs/off_policy.md has the formulas.

Divergence from the reference policy.

Imitation of the policy's own good samples, beside what advantages teach.

How a critic learns; which model it is and where it lives is the section `critic` of the experiment.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from nemorl.config.base import Config, default_variant
from nemorl.config.yaml import merged

from .advantages import AdvantageConfig, GroupAdvantageConfig, RemaxAdvantageConfig, TokenAdvantageBase
from .base import AlgorithmBase
from .losses import ClipLossConfig, PolicyLossConfig
from .presets import PRESETS


class EntropyBonusConfig(Config):
    """A fixed weight, for each token as the loss weighs it."""

    name: Literal["bonus"] = "bonus"
    coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy that is added to the objective."""


class AdaptiveEntropyConfig(Config):
    """A weight that grows while the entropy is below a target (Skywork-OR1, He et al. 2025, 2505.22312)."""

    name: Literal["adaptive"]
    target: float = Field(0.2, gt=0)
    """Mean entropy per token, in nats, below which the bonus counts."""
    initial: float = Field(0.0, ge=0)
    """Weight of the first step."""
    change: float = Field(0.005, gt=0)
    """What a step adds to the weight below the target, and takes from it above."""
    max_coefficient: float = Field(1.0, gt=0)
    """The weight stays between 0 and this."""


EntropyConfig = Annotated[
    EntropyBonusConfig | AdaptiveEntropyConfig,
    Field(discriminator="name"),
    default_variant(EntropyBonusConfig),
]


class RefillConfig(Config):
    """Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476): others are sampled for groups dropped."""

    max_batches: int = Field(10, ge=2)
    """A step samples at most this many times `num_prompts_per_step` groups."""
    at_cap: Literal["fewer", "stop"] = "fewer"
    """When these are not enough: train on the groups there are, or stop the run with the reason."""


class FiltersConfig(Config):
    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal: comparing them teaches nothing."""
    min_mean_reward: float | None = None
    """Drop groups whose mean reward is less."""
    max_mean_reward: float | None = None
    """Drop groups whose mean reward is more."""
    reward: str | None = None
    """Name of the reward by which groups are dropped; the weighted sum when not given."""
    refill: RefillConfig | None = None
    """Sample other groups for those dropped by one of the fields above; without it a step has fewer."""
    keep_most_varied: float | None = Field(None, gt=0, lt=1)
    """Of a batch train only this share of the groups, those whose rewards vary most (StarPO-S)."""
    drop_truncated: bool = False
    """Trajectories that a limit of tokens ended do not train; their reward counts in their group."""

    @property
    def drops_groups(self) -> bool:
        """Whether a group can be dropped by what it is, without the rest of its batch."""
        return self.drop_equal_rewards or self.min_mean_reward is not None or self.max_mean_reward is not None

    @property
    def active(self) -> bool:
        """Whether anything is kept from training at all."""
        return self.drops_groups or self.keep_most_varied is not None or self.drop_truncated


class OnlineBase(AlgorithmBase):
    """Sample groups, learn from them, hand the weights over."""

    num_prompts_per_step: int = Field(ge=1)
    """Tasks sampled in a step."""
    num_generations_per_prompt: int = Field(ge=1)
    """Trajectories of each task, a group."""
    max_staleness: int = Field(0, ge=0)
    """Versions that the sampling weights may lie behind the trained ones; 0 is synchronous."""
    filters: FiltersConfig = FiltersConfig()
    """What of a step's samples does not train."""
    max_logprob_gap: float = Field(0.2, gt=0)
    """Stop when the mean absolute difference between the engine's and the trainer's logprobs is larger."""
    max_token_logprob_gap: float | None = Field(None, gt=0)
    """Stop when that difference is larger at any token; not looked at when not given."""
    logprob_gap_period: int | None = Field(None, ge=1)
    """Steps between comparisons before an update, each a forward pass; the first batch always has one."""

    @property
    def online(self) -> bool:
        """It samples in every step."""
        return True

    @property
    def trajectories_per_step(self) -> int:
        """Sequences that a step samples."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def greedy_baseline(self) -> bool:
        """Whether a greedy sample of each task is wanted beside its group."""
        return False


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


class KLConfig(Config):
    """Which estimator gives which gradient is told in `nemorl.algorithms.kl` and docs/off_policy.md."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the divergence from the reference policy; 0 keeps no reference at all."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence per token (Schulman, "Approximating KL divergence", 2020)."""
    placement: Literal["loss", "reward"] = "loss"
    """Add it to the loss, where its gradient counts, or take it from each token's reward."""
    straight_through: bool = False
    """In the loss: the value is the estimator's and the gradient k2's, which is that of the divergence."""
    importance_weighted: bool = False
    """In the loss: weigh by the ratio to the policy that sampled, so that stale samples do not bias it."""
    max_value: float | None = Field(None, gt=0)
    """Clamp each token's estimate to ± this, without gradient beyond, also of k2's in `straight_through`;
    verl and OpenRLHF: 10."""


class LikelihoodConfig(Config):
    """The likelihood of samples that were paid well (VAPO's positive-example loss, arXiv 2504.05118)."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of their mean negative logprob per token, added to the loss; the paper takes 0.1."""
    min_reward: float = 1.0
    """A trajectory is imitated when its reward is at least this."""


class CriticLearningConfig(Config):
    value_clip: float | None = Field(0.2, gt=0)
    """Values are clipped to this distance from those before the step, and the larger error counts (PPO);
    null clips nothing."""
    aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"
    """How squared errors of tokens become one number."""
    warmup_steps: int = Field(0, ge=0)
    """Steps at the beginning in which the critic alone learns."""


if TYPE_CHECKING:
    OnlineName = str
else:
    OnlineName = Literal[tuple(PRESETS)]


class OnlineConfig(OnlineBase):
    """Sample, score, learn, hand the weights over."""

    name: OnlineName
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps that share the batch of one step; divides the number of trajectories."""
    num_epochs: int = Field(1, ge=1)
    """Times that the batch of a step is gone through, in the same minibatches."""
    advantage: AdvantageConfig = GroupAdvantageConfig()
    """How rewards become advantages."""
    loss: PolicyLossConfig = ClipLossConfig()
    """The policy's loss."""
    kl: KLConfig = KLConfig()
    """Divergence from the reference policy."""
    entropy: EntropyConfig = EntropyBonusConfig()
    """What the entropy is worth."""
    likelihood: LikelihoodConfig = LikelihoodConfig()
    """What the likelihood of well-paid samples is worth."""
    correction: CorrectionConfig = NoCorrectionConfig()
    """How samples of another policy than the one that learns are weighed or left out."""
    critic: CriticLearningConfig | None = None
    """How a critic learns, for advantages that want one; which model it is says the experiment's `critic`."""

    @model_validator(mode="before")
    @classmethod
    def _over_preset(cls, section: Any) -> Any:
        """What the experiment says, laid over the preset that it names."""
        if not isinstance(section, dict) or section.get("name") not in PRESETS:
            return section
        return merged(dict(PRESETS[section["name"]].settings), section)

    @property
    def sequences_per_update(self) -> int:
        """Trajectories of a minibatch."""
        return self.trajectories_per_step // self.num_minibatches

    @property
    def keeps_reference(self) -> bool:
        """Whether divergence from it counts."""
        return self.kl.coefficient > 0

    @property
    def keeps_critic(self) -> bool:
        """Whether values are learnt."""
        return self.critic is not None

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a step."""
        return self.num_minibatches * self.num_epochs

    @property
    def kl_in_reward(self) -> bool:
        """Whether divergence is taken from the rewards; the loss leaves it out then."""
        return self.kl.coefficient > 0 and self.kl.placement == "reward"

    @property
    def greedy_baseline(self) -> bool:
        """Whether a greedy sample of each task is wanted beside its group."""
        return isinstance(self.advantage, RemaxAdvantageConfig)

    @property
    def estimates_tokens(self) -> bool:
        """Whether advantages differ from token to token, so that policy workers compute them."""
        return isinstance(self.advantage, TokenAdvantageBase)

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the policy's logprobs before the first update have to be computed.

        A single update sees the weights before it, so its own logprobs are the old ones, unless the loss
        chooses among all tokens before it sees any, by covariance or by entropy, or is divided by those that
        the correction keeps. Several want the pass where a ratio, a weight or a mask is taken against the old
        policy; in the bypass form of the correction the engine's logprobs are the old ones.
        """
        compared = self.loss.has_ratio or self.correction.compares or self.kl.importance_weighted
        before_all = self.loss.selects_tokens or self.correction.divisor == "kept"
        wanted = before_all or (self.updates_per_step > 1 and compared)
        by_entropy = self.loss.selects_by_entropy
        return self.kl_in_reward or by_entropy or (wanted and self.correction.form == "decoupled")
