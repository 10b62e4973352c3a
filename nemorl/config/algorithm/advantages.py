"""Estimators of advantages: of trajectories compared with others, or of each token; and their algorithms."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemorl.config.base import Config, Variants, check
from nemorl.errors import Problem, Problems

from .base import online_preset

Over = Literal["tokens", "trajectories"]
Variance = Literal["unbiased", "biased"]


class AdvantageBase(Config):
    per_token: ClassVar[bool] = False  # policy workers compute an advantage for each token
    per_turn: ClassVar[bool] = False  # tokens of different turns have different advantages
    needs_values: ClassVar[bool] = False  # of a critic, at each token
    needs_collisions: ClassVar[bool] = False  # sums of squared probabilities of the old policy, at each token
    needs_group: ClassVar[bool] = False  # compares the trajectories of a task with each other
    needs_greedy_sample: ClassVar[bool] = False  # of each task
    uses_reward_sum: ClassVar[bool] = True  # so that a divergence can be subtracted from it

    @property
    def min_members(self) -> int:
        """Trajectories of a group below which all its advantages are 0, or it has none."""
        return 2 if self.needs_group else 1

    @check
    def _epsilon_is_used(self) -> Problems:
        if not getattr(self, "normalize", True):
            reason = "algorithm.advantage.normalize is false, so nothing is divided; set it, or remove this"
            yield from self.without_effect(("epsilon",), reason)


class TokenAdvantageBase(AdvantageBase):
    per_token: ClassVar[bool] = True
    per_turn: ClassVar[bool] = True


class WhitenedAdvantageBase(TokenAdvantageBase):
    needs_values: ClassVar[bool] = True
    whiten: bool = True
    """Shift and scale the advantages to mean 0 and variance 1 over the sampled tokens of the batch."""
    variance: Variance = "unbiased"
    """Variance of n tokens divided by n - 1, as in verl, or by n, as in OpenRLHF."""

    @check
    def _variance_is_used(self) -> Problems:
        if not self.whiten:
            reason = "algorithm.advantage.whiten is false, so nothing is divided; set it, or remove this"
            yield from self.without_effect(("variance",), reason)


class GaeConfig(WhitenedAdvantageBase):
    """Generalized advantage estimation over sampled tokens (Schulman et al. 2015, arXiv 1506.02438)."""

    name: Literal["gae"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one sampled token to the next."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of the policy's advantages."""
    length_adaptive_alpha: float | None = Field(None, gt=0)
    """In place of `lam`, 1 - 1 / (alpha l) for a trajectory of l sampled tokens (VAPO, arXiv 2504.05118)."""
    critic_lam: float | None = Field(None, ge=0, le=1)
    """Lambda of the returns that the critic learns; null is the policy's. 1 are the observed returns."""

    @check
    def _one_lambda_is_used(self) -> Problems:
        if self.length_adaptive_alpha is not None:
            reason = "length_adaptive_alpha replaces it; remove this, or set that to null"
            yield from self.without_effect(("lam",), reason)


class TurnGaeConfig(WhitenedAdvantageBase):
    """GAE in which a turn is one action; all its tokens have its advantage."""

    name: Literal["turn_gae"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one turn to the next."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda over turns."""


class BiLevelGaeConfig(WhitenedAdvantageBase):
    """GAE over turns, and inside each turn over its tokens (VAGEN, arXiv 2510.16907)."""

    name: Literal["bi_level_gae"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one token of a turn to the next."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda over the tokens of a turn."""
    turn_gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one turn to the next."""
    turn_lam: float = Field(1.0, ge=0, le=1)
    """Lambda over turns."""


class TokenReturnsConfig(WhitenedAdvantageBase):
    """The sum of rewards from each token on, without a critic (REINFORCE++, arXiv 2501.03262)."""

    needs_values: ClassVar[bool] = False
    name: Literal["token_returns"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one sampled token to the next."""


class OptimalTokenBaselineConfig(TokenAdvantageBase):
    """A baseline of the group for each token, weighted by squared gradients (OTB, arXiv 2602.07078)."""

    needs_collisions: ClassVar[bool] = True
    needs_group: ClassVar[bool] = True
    name: Literal["otb"]


class GroupRelativeBase(AdvantageBase):
    """How a reward is compared with those of its group."""

    needs_group: ClassVar[bool] = True
    normalize: bool = True
    """Divide by the standard deviation of the group (unbiased)."""
    leave_one_out: bool = False
    """The baseline of a sample is the mean of the other samples, not of all."""
    deviation: Literal["all", "others"] = "all"
    """The standard deviation is of all samples, or as the baseline of the others: NeMo-RL. Where it is 0, as
    always of a single other sample, nothing is divided."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""

    @check
    def _others_are_the_baseline(self) -> Problems:
        if self.deviation == "others" and not (self.leave_one_out and self.normalize):
            fix = "it requires leave_one_out and normalize; set both, or set this to all"
            yield Problem("deviation", self.deviation, fix)


class GroupAdvantageConfig(GroupRelativeBase):
    """The mean of the group is the baseline (Shao et al. 2024, arXiv 2402.03300)."""

    name: Literal["group"] = "group"


class ReinforceAdvantageConfig(AdvantageBase):
    """The reward, compared with the batch instead of a group (Williams 1992)."""

    name: Literal["reinforce"]
    normalization: Literal["none", "mean", "whiten"] = "whiten"
    """The reward, the reward minus the mean of the batch, or that divided by the standard deviation."""
    over: Over = "trajectories"
    """Mean and standard deviation are over trajectories, or over sampled tokens."""
    variance: Variance = "unbiased"
    """Variance of n of them divided by n - 1, or by n, as in NeMo-RL and OpenRLHF."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the standard deviation."""

    @check
    def _scale_is_used(self) -> Problems:
        how = f"algorithm.advantage.normalization is `{self.normalization}`"
        if self.normalization != "whiten":
            reason = f"{how}, so nothing is divided; use `whiten`, or remove this"
            yield from self.without_effect(("epsilon", "variance"), reason)
        if self.normalization == "none":
            reason = f"{how}, so no mean is computed; use `mean`, or remove this"
            yield from self.without_effect(("over",), reason)


class GroupThenBatchAdvantageConfig(AdvantageBase):
    """The group's mean is the baseline, the batch the scale (REINFORCE++-baseline, arXiv 2501.03262)."""

    needs_group: ClassVar[bool] = True
    name: Literal["group_then_batch"]
    over: Over = "tokens"
    """Mean and standard deviation of the batch are over sampled tokens, or over trajectories."""
    variance: Variance = "unbiased"
    """Variance of n of them divided by n - 1, or by n, as in NeMo-RL and OpenRLHF."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the standard deviation of the batch."""


class RemaxAdvantageConfig(AdvantageBase):
    """The reward of a greedy sample of the same task is the baseline (Li et al. 2023, arXiv 2310.10505)."""

    needs_greedy_sample: ClassVar[bool] = True
    name: Literal["remax"]


class OptimalBaselineAdvantageConfig(AdvantageBase):
    """The group's mean weighted by length, which has the least variance (OPO, arXiv 2505.23585)."""

    needs_group: ClassVar[bool] = True
    name: Literal["opo"]


class GpgAdvantageConfig(AdvantageBase):
    """The group's mean, scaled up for groups without a signal (GPG, arXiv 2504.02546)."""

    needs_group: ClassVar[bool] = True
    name: Literal["gpg"]
    normalize: bool = False
    """Divide by the standard deviation of the group (unbiased) as well."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""


class GdpoAdvantageConfig(GroupRelativeBase):
    """Each reward is normalized in its group before they are summed (GDPO, arXiv 2601.05242)."""

    uses_reward_sum: ClassVar[bool] = False
    name: Literal["gdpo"]
    whiten_batch: bool = True
    """Shift and scale the sums to mean 0 and variance 1 over the batch."""
    over: Over = "trajectories"
    """That mean and variance are over trajectories, or over sampled tokens, as in verl."""
    batch_epsilon: float = Field(1e-6, ge=0)
    """Added to the standard deviation of the batch."""

    @check
    def _batch_is_whitened(self) -> Problems:
        if not self.whiten_batch:
            reason = "algorithm.advantage.whiten_batch is false; set it, or remove this"
            yield from self.without_effect(("over", "batch_epsilon"), reason)


class PassAtKAdvantageConfig(AdvantageBase):
    """What a trajectory adds to the chance that one of k passes (Chen et al. 2025, arXiv 2508.10751)."""

    needs_group: ClassVar[bool] = True
    uses_reward_sum: ClassVar[bool] = False
    name: Literal["pass_at_k"]
    k: int = Field(4, ge=1)
    """Samples of which one has to pass."""
    pass_reward: float = 1.0
    """A trajectory passes when its reward is at least this."""

    @property
    def min_members(self) -> int:
        return self.k + 1


class TurnAdvantageConfig(AdvantageBase):
    """Each turn is compared with the same turn of the group (MT-GRPO, Zeng et al. 2025, arXiv 2505.11821)."""

    needs_group: ClassVar[bool] = True
    per_turn: ClassVar[bool] = True
    name: Literal["turn"]
    outcome_weight: float = Field(1.0, ge=0)
    """Weight of the outcome's advantage in the turns before the last one."""
    discount: float = Field(0.0, ge=0, le=1)
    """Discount of the rewards of later turns before the last, per turn; 0 leaves them out."""
    normalize: bool = True
    """Divide by the standard deviation over the group (unbiased)."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""


class CustomAdvantageConfig(AdvantageBase):
    """A custom function (docs/algorithms.md)."""

    name: Literal["custom"]
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments bound to the function."""


_WithMean = GroupAdvantageConfig | ReinforceAdvantageConfig | GroupThenBatchAdvantageConfig
_WithBaseline = _WithMean | RemaxAdvantageConfig | OptimalBaselineAdvantageConfig | GpgAdvantageConfig
_Other = GdpoAdvantageConfig | PassAtKAdvantageConfig | TurnAdvantageConfig | CustomAdvantageConfig
OfGroupsConfig = _WithBaseline | _Other
_WithCritic = GaeConfig | TurnGaeConfig | BiLevelGaeConfig
OfTokensConfig = _WithCritic | TokenReturnsConfig | OptimalTokenBaselineConfig

AdvantageConfig = Annotated[OfGroupsConfig | OfTokensConfig, Variants(GroupAdvantageConfig)]

_KL = {"estimator": "k1", "placement": "reward"}
_PPO: dict[str, dict[str, Any]] = {"kl": _KL, "critic": {}}
_TWO_LEVELS = {"name": "bi_level_gae", "turn_gamma": 0.95}
_LEAVE_ONE_OUT = {"name": "group", "normalize": False, "leave_one_out": True}
_REINFORCE = {"name": "reinforce", "aggregation": "seq-mean-token-sum"}

# The named algorithms that are an advantage with a common loss.
PRESETS = {
    "bi_level_gae": online_preset(
        "PPO with GAE over turns and over their tokens", "2510.16907", _TWO_LEVELS, **_PPO
    ),
    "gdpo": online_preset("Group-decoupled normalization of several rewards", "2601.05242", "gdpo"),
    "gpg": online_preset("Group policy gradient", "2504.02546", "gpg", "reinforce"),
    "grpo": online_preset("Group relative policy optimization", "2402.03300"),
    "mt_grpo": online_preset("GRPO with an advantage for each turn", "2505.11821", "turn"),
    "opo": online_preset("On-policy RL with the optimal baseline", "2505.23585", "opo", _REINFORCE),
    "otb": online_preset("GRPO with the optimal baseline of each token", "2602.07078", "otb"),
    "pass_at_k": online_preset("Training on pass@k", "2508.10751", "pass_at_k"),
    "ppo": online_preset("Proximal policy optimization with a critic", "1707.06347", "gae", **_PPO),
    "reinforce": online_preset(
        "REINFORCE with the batch as the baseline",
        "https://doi.org/10.1007/BF00992696",
        advantage={"name": "reinforce", "normalization": "mean"},
        loss=_REINFORCE,
    ),
    "reinforce_plus_plus": online_preset(
        "REINFORCE with returns of tokens, whitened over the batch", "2501.03262", "token_returns", kl=_KL
    ),
    "reinforce_plus_plus_baseline": online_preset(
        "REINFORCE++ with the mean of a group as the baseline", "2501.03262", "group_then_batch"
    ),
    "remax": online_preset("REINFORCE, a greedy answer as the baseline", "2310.10505", "remax", _REINFORCE),
    "rloo": online_preset(
        "REINFORCE, the others of the group as the baseline", "2402.14740", _LEAVE_ONE_OUT, _REINFORCE
    ),
    "turn_gae": online_preset("PPO over turns", "1506.02438", "turn_gae", **_PPO),
    "vapo": online_preset(
        "Value-based augmented PPO",
        "2504.05118",
        advantage={"name": "gae", "length_adaptive_alpha": 0.05, "critic_lam": 1.0},
        loss={"name": "clip", "clip_high": 0.28},
        likelihood={"coefficient": 0.1},
        critic={"warmup_steps": 50},
    ),
}
