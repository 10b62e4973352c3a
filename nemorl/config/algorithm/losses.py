"""Losses of a policy on its samples, the algorithms named after one, and the loss of a critic."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemorl.config.base import Config, Variants, check
from nemorl.errors import ABSENT, Problem, Problems

from .base import FIXED_LENGTH, Aggregation, online_preset

_RATIO = frozenset({"ratio/mean", "ratio/max", "ratio/ess", "kl/old"})
_CLIPPED = frozenset({"clip_fraction/low", "clip_fraction/high"})


class PolicyLossBase(Config):
    has_ratio: ClassVar[bool] = True  # compares the policy with the one before the updates
    selects_tokens: ClassVar[bool] = False  # among all tokens of an update, before its micro-batches
    per_sequence: ClassVar[bool] = False  # its formula has one advantage for a sequence
    acts_from_second_update: ClassVar[bool] = False  # of a step; without gradient at the old policy
    metrics: ClassVar[frozenset[str]] = _RATIO | _CLIPPED  # that it produces, besides `loss/policy`

    aggregation: Aggregation = "token-mean"
    """How per-token losses are aggregated; sums are divided by counts of the whole batch."""
    aggregation_length: int | None = Field(None, ge=1)
    """The fixed length that divides in `seq-mean-token-sum-norm`."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Share of an update's tokens, those of the highest entropy, that have a loss; Wang et al. 2025 (arXiv
    2506.01939) use 0.2. Less than 1 requires a forward pass before the updates."""

    @property
    def selects_by_entropy(self) -> bool:
        """True if tokens of low entropy have no loss."""
        return self.top_entropy_quantile < 1

    @check
    def _aggregation_has_its_length(self) -> Problems:
        if self.aggregation == FIXED_LENGTH and self.aggregation_length is None:
            fix = f"`{FIXED_LENGTH}` divides by this length; set it, usually to generation.max_new_tokens"
            yield Problem("aggregation_length", ABSENT, fix)
        if self.aggregation != FIXED_LENGTH:
            reason = f"`{self.aggregation}` does not use it; remove it, or use `{FIXED_LENGTH}`"
            yield from self.without_effect(("aggregation_length",), reason)


class ClipLossConfig(PolicyLossBase):
    """PPO's clipped surrogate per token (Schulman et al. 2017, arXiv 1707.06347)."""

    metrics: ClassVar[frozenset[str]] = _RATIO | _CLIPPED | {"clip_fraction/dual"}
    name: Literal["clip"] = "clip"
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above 1 + clip_high; more than clip_low is DAPO's clip-higher."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound of the ratio where the advantage is negative (Ye et al. 2020, 1912.09729)."""


class GspoLossConfig(PolicyLossBase):
    """One ratio for a sequence, the geometric mean of its tokens' (Zheng et al. 2025, arXiv 2507.18071)."""

    per_sequence: ClassVar[bool] = True
    name: Literal["gspo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """How per-token losses are aggregated; each sequence has the same weight, as it has one ratio."""
    clip_low: float = Field(3e-4, ge=0, lt=1)
    """The sequence's ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(4e-4, ge=0)
    """The sequence's ratio is clipped above 1 + clip_high."""


class GspoTokenLossConfig(PolicyLossBase):
    """GSPO whose tokens may differ in their advantages (arXiv 2507.18071)."""

    name: Literal["gspo_token"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """How per-token losses are aggregated; each sequence has the same weight, as it has one ratio."""
    clip_low: float = Field(3e-4, ge=0, lt=1)
    """The sequence's ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(4e-4, ge=0)
    """The sequence's ratio is clipped above 1 + clip_high."""


class GmpoLossConfig(PolicyLossBase):
    """Geometric mean of clipped ratios (Zhao et al. 2025, arXiv 2507.20673)."""

    per_sequence: ClassVar[bool] = True
    name: Literal["gmpo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """How per-token losses are aggregated; each sequence has the same weight, as it has one ratio."""
    clip_low: float = Field(0.4, ge=0)
    """The logarithm of a token's ratio is clipped below -clip_low."""
    clip_high: float = Field(0.4, ge=0)
    """The logarithm of a token's ratio is clipped above clip_high."""


class CispoLossConfig(PolicyLossBase):
    """REINFORCE weighted by a clipped ratio, which has no gradient (MiniMax 2025, arXiv 2506.13585)."""

    name: Literal["cispo"]
    clip_low: float | None = Field(None, ge=0, lt=1)
    """The weight is at least 1 - clip_low; no lower bound when not given, as in the paper."""
    clip_high: float = Field(4.0, ge=0)
    """The weight is at most 1 + clip_high; TRL's epsilon_high is this bound itself."""


class DppoLossConfig(PolicyLossBase):
    """A bound on the divergence of each token instead of its ratio (DPPO, arXiv 2602.04879)."""

    name: Literal["dppo"]
    divergence: Literal["tv", "kl"] = "tv"
    """Of the token and all others as two events: total variation, or the divergence from old to current."""
    clip_low: float = Field(0.15, ge=0)
    """Tokens that became less likely by more than this have no loss where the advantage is not positive."""
    clip_high: float = Field(0.15, ge=0)
    """Tokens that became more likely by more than this have no loss where the advantage is positive."""
    max_ratio: float = Field(20.0, gt=0)
    """The ratio that weighs a token is cut to this."""


class SapoLossConfig(PolicyLossBase):
    """A sigmoid gate instead of clipping (Gao et al. 2025, arXiv 2511.20347)."""

    metrics: ClassVar[frozenset[str]] = _RATIO
    name: Literal["sapo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """How per-token losses are aggregated; each sequence has the same weight, as in the paper."""
    temperature_positive: float = Field(1.0, gt=0)
    """Steepness of the gate where the advantage is positive."""
    temperature_negative: float = Field(1.05, gt=0)
    """The same elsewhere; larger ones let the gradient fade faster with distance."""


class ReinforceLossConfig(PolicyLossBase):
    """`-A log p` (Williams 1992): no ratio and no clipping, as in RLOO, ReMax, OPO and GPG."""

    has_ratio: ClassVar[bool] = False
    metrics: ClassVar[frozenset[str]] = frozenset()
    name: Literal["reinforce"]


class ClipCovLossConfig(PolicyLossBase):
    """PPO's loss without some tokens of high covariance (Cui et al. 2025, arXiv 2505.22617)."""

    selects_tokens: ClassVar[bool] = True
    metrics: ClassVar[frozenset[str]] = _RATIO | _CLIPPED | {"selected_fraction"}
    name: Literal["clip_cov"]
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above 1 + clip_high."""
    fraction: float = Field(2e-4, gt=0, le=1)
    """Tokens of an update that are left out, at most."""
    covariance_low: float = 1.0
    """Only tokens whose covariance of logprob and advantage is at least this are left out."""
    covariance_high: float = 5.0
    """Only tokens whose covariance of logprob and advantage is at most this are left out."""

    @check
    def _bounds_are_in_order(self) -> Problems:
        if self.covariance_low >= self.covariance_high:
            fix = f"it must be less than algorithm.loss.covariance_high, {self.covariance_high:g}"
            yield Problem("covariance_low", self.covariance_low, fix)


class KlCovLossConfig(PolicyLossBase):
    """Tokens of the highest covariance are held near the old policy (arXiv 2505.22617)."""

    selects_tokens: ClassVar[bool] = True
    acts_from_second_update: ClassVar[bool] = True
    metrics: ClassVar[frozenset[str]] = _RATIO | {"selected_fraction"}
    name: Literal["kl_cov"]
    fraction: float = Field(2e-4, gt=0, le=1)
    """Tokens of an update that are held."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of their distance from the old policy."""


class CustomLossConfig(PolicyLossBase):
    """A custom function (docs/algorithms.md)."""

    metrics: ClassVar[frozenset[str]] = _RATIO
    name: Literal["custom"]
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments bound to the function."""


_Clipped = ClipLossConfig | GspoLossConfig | GspoTokenLossConfig | GmpoLossConfig | CispoLossConfig
_Other = (
    DppoLossConfig
    | SapoLossConfig
    | ReinforceLossConfig
    | ClipCovLossConfig
    | KlCovLossConfig
    | CustomLossConfig
)
PolicyLossConfig = Annotated[_Clipped | _Other, Variants(ClipLossConfig)]


class CriticLearningConfig(Config):
    metrics: ClassVar[frozenset[str]] = frozenset(
        {
            *("time/values", "critic/skipped_updates", "critic/loss", "critic/value", "critic/return"),
            *("critic/clip_fraction", "critic/explained_variance", "critic/grad_norm", "critic/lr"),
            *("critic/guards/loss", "critic/guards/grad_norm"),
        }
    )
    value_clip: float | None = Field(0.2, gt=0)
    """Clip values to this distance from those before the step, and use the larger error (PPO); null clips
    nothing."""
    aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"
    """How squared errors of tokens are aggregated."""
    loss_scale: float = Field(1.0, gt=0)
    """Factor of the loss, and so of the gradient before its norm is clipped; NeMo-RL: 0.4."""
    warmup_steps: int = Field(0, ge=0)
    """First steps in which only the critic is trained."""


# The named algorithms whose loss, or choice of samples, is their own; their advantage is GRPO's.
_CLIP_HIGHER = {"name": "clip", "clip_high": 0.28}
_UNSCALED = {"name": "group", "normalize": False}
_UNBIASED = {"name": "clip", "aggregation": FIXED_LENGTH}
_KL_COV = {"name": "kl_cov", "fraction": 0.002}
_DYNAMIC_SAMPLING = {"drop_equal_rewards": True, "refill": {"max_batches": 10}}
_MOST_VARIED = {"keep_most_varied": 0.25}
PRESETS = {
    "cispo": online_preset("Clipped importance sampling weights (MiniMax-M1)", "2506.13585", loss="cispo"),
    "clip_cov": online_preset("Covariance clipping against entropy collapse", "2505.22617", loss="clip_cov"),
    "dapo": online_preset(
        "Decoupled clip and dynamic sampling", "2503.14476", loss=_CLIP_HIGHER, filters=_DYNAMIC_SAMPLING
    ),
    "dr_grpo": online_preset(
        "GRPO done right: no bias by length or by difficulty", "2503.20783", _UNSCALED, _UNBIASED
    ),
    "gmpo": online_preset("Geometric mean policy optimization", "2507.20673", loss="gmpo"),
    "gspo": online_preset("Group sequence policy optimization", "2507.18071", loss="gspo"),
    "gspo_token": online_preset("GSPO with advantages of tokens", "2507.18071", loss="gspo_token"),
    "kl_cov": online_preset(
        "Covariance-held tokens against entropy collapse", "2505.22617", loss=_KL_COV, num_minibatches=8
    ),
    "sapo": online_preset("Soft adaptive policy optimization", "2511.20347", loss="sapo"),
    "starpo_s": online_preset(
        "Agents on the most uncertain tasks", "2504.20073", loss=_CLIP_HIGHER, filters=_MOST_VARIED
    ),
}
