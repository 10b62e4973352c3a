"""How good a trajectory, a turn or a token of it was beside what could be expected.

Advantages that differ from token to token: of a critic's values, or of what is paid after each token.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemorl.config.base import Config, default_variant


class TokenAdvantageBase(Config):
    """What estimators share that run over the sampled tokens of a trajectory."""

    needs_values: ClassVar[bool] = True
    """Whether a critic has to say what may be expected at each token."""

    whiten: bool = True
    """Shift and scale the advantages to mean 0 and variance 1 over the sampled tokens of the whole batch."""


class GaeConfig(TokenAdvantageBase):
    """Generalised advantage estimation over sampled tokens (Schulman et al. 2015, arXiv 1506.02438)."""

    name: Literal["gae"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one sampled token to the next."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of the policy's advantages."""
    length_adaptive_alpha: float | None = Field(None, gt=0)
    """In place of `lam`, 1 - 1 / (alpha l) for a trajectory of l sampled tokens (VAPO, arXiv 2504.05118)."""
    critic_lam: float | None = Field(None, ge=0, le=1)
    """Lambda of the returns that the critic learns; null takes the policy's. With 1 it learns what came."""


class TurnGaeConfig(TokenAdvantageBase):
    """GAE in which a whole turn is one action; all its tokens have its advantage."""

    name: Literal["turn_gae"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one turn to the next."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda over turns."""


class BiLevelGaeConfig(TokenAdvantageBase):
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


class TokenReturnsConfig(TokenAdvantageBase):
    """What is paid from each token on, without a critic (REINFORCE++, arXiv 2501.03262)."""

    needs_values: ClassVar[bool] = False

    name: Literal["token_returns"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one sampled token to the next."""


TOKEN_ADVANTAGES = (GaeConfig, TurnGaeConfig, BiLevelGaeConfig, TokenReturnsConfig)


Over = Literal["tokens", "trajectories"]


class GroupAdvantageConfig(Config):
    """The group's own mean is the baseline (Shao et al. 2024, arXiv 2402.03300)."""

    name: Literal["group"] = "group"
    normalize: bool = True
    """Divide by the standard deviation of the group (unbiased)."""
    leave_one_out: bool = False
    """The baseline of a sample is the mean of the others instead of the mean of all."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""


class ReinforceAdvantageConfig(Config):
    """The reward itself, against the whole batch instead of a group (Williams 1992)."""

    name: Literal["reinforce"]
    normalization: Literal["none", "mean", "whiten"] = "whiten"
    """Take the reward as it is, less the mean of the batch, or that divided by its standard deviation."""
    over: Over = "trajectories"
    """Whether each trajectory, or each sampled token, counts once in mean and standard deviation."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the standard deviation."""


class GroupThenBatchAdvantageConfig(Config):
    """The group's mean is the baseline, the batch the scale (REINFORCE++-baseline, arXiv 2501.03262)."""

    name: Literal["group_then_batch"]
    over: Over = "tokens"
    """Whether each sampled token, or each trajectory, counts once in the batch's mean and deviation."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the standard deviation of the batch."""


class RemaxAdvantageConfig(Config):
    """The reward of a greedy sample of the same task is the baseline (Li et al. 2023, arXiv 2310.10505)."""

    name: Literal["remax"]


class OptimalBaselineAdvantageConfig(Config):
    """The group's mean weighted by length, which has the least variance (OPO, arXiv 2505.23585)."""

    name: Literal["opo"]


class GpgAdvantageConfig(Config):
    """The group's mean, scaled up for groups that teach nothing (GPG, arXiv 2504.02546)."""

    name: Literal["gpg"]
    normalize: bool = False
    """Divide by the standard deviation of the group (unbiased) as well."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""


class GdpoAdvantageConfig(Config):
    """Each reward is normalised in its group by itself, then they are summed (GDPO, arXiv 2601.05242)."""

    name: Literal["gdpo"]
    whiten_batch: bool = True
    """Shift and scale the sums to mean 0 and variance 1 over the trajectories of the batch."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to each standard deviation."""


class PassAtKAdvantageConfig(Config):
    """What a trajectory adds to the chance that one of k passes (Chen et al. 2025, arXiv 2508.10751)."""

    name: Literal["pass_at_k"]
    k: int = Field(4, ge=1)
    """Samples of which one has to pass."""
    pass_reward: float = 1.0
    """A trajectory passes when its reward is at least this."""


class TurnAdvantageConfig(Config):
    """Each turn is compared with the same turn of the group (MT-GRPO, Zeng et al. 2025, arXiv 2505.11821)."""

    name: Literal["turn"]
    outcome_weight: float = Field(1.0, ge=0)
    """Weight of the outcome's advantage in the turns before the last one."""
    discount: float = Field(0.0, ge=0, le=1)
    """What is paid in later turns before the last counts too, each further on by this factor."""
    normalize: bool = True
    """Divide by the standard deviation over the group (unbiased)."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""


class CustomAdvantageConfig(Config):
    """A function of your own (docs/algorithms.md)."""

    name: Literal["custom"]
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments bound to the function."""


OfGroupsConfig = (
    GroupAdvantageConfig
    | ReinforceAdvantageConfig
    | GroupThenBatchAdvantageConfig
    | RemaxAdvantageConfig
    | OptimalBaselineAdvantageConfig
    | GpgAdvantageConfig
    | GdpoAdvantageConfig
    | PassAtKAdvantageConfig
    | TurnAdvantageConfig
    | CustomAdvantageConfig
)
OfTokensConfig = GaeConfig | TurnGaeConfig | BiLevelGaeConfig | TokenReturnsConfig

AdvantageConfig = Annotated[
    OfGroupsConfig | OfTokensConfig,
    Field(discriminator="name"),
    default_variant(GroupAdvantageConfig),
]
