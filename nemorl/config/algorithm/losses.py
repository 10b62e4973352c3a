"""The loss of a policy on its own samples."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemorl.config.base import Config, default_variant

from .base import Aggregation

_RATIO = frozenset({"ratio/mean", "ratio/max", "ratio/ess", "kl/old"})
_CLIPPED = frozenset({"clip_fraction/low", "clip_fraction/high"})


class PolicyLossBase(Config):
    """What all losses of a policy share."""

    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number; sums are divided by counts of the whole batch."""
    aggregation_length: int | None = Field(None, ge=1)
    """The fixed length that divides in `seq-mean-token-sum-norm`."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Share of an update's tokens, those of the highest entropy, that have a loss; Wang et al. 2025 (arXiv
    2506.01939) take 0.2. Less than 1 wants a forward pass before the updates."""

    has_ratio: ClassVar[bool] = True  # it compares the policy with the one before the updates
    selects_tokens: ClassVar[bool] = False  # among all tokens of an update, before its micro-batches
    whole_sequences: ClassVar[bool] = False  # its formula has one advantage for a sequence
    figures: ClassVar[frozenset[str]] = _RATIO | _CLIPPED  # what it writes beside `loss/policy`

    @property
    def selects_by_entropy(self) -> bool:
        """Whether tokens of low entropy have no loss."""
        return self.top_entropy_quantile < 1


class ClipLossConfig(PolicyLossBase):
    """PPO's clipped surrogate per token (Schulman et al. 2017, arXiv 1707.06347)."""

    name: Literal["clip"] = "clip"
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above 1 + clip_high; more than clip_low is DAPO's clip-higher."""
    dual_clip: float | None = Field(None, gt=1)
    """Where the advantage is negative, the ratio counts up to this at most (Ye et al. 2020, 1912.09729)."""

    figures: ClassVar[frozenset[str]] = _RATIO | _CLIPPED | {"clip_fraction/dual"}


class GspoLossConfig(PolicyLossBase):
    """One ratio for a sequence, the geometric mean of its tokens' (Zheng et al. 2025, arXiv 2507.18071)."""

    name: Literal["gspo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """How per-token losses become one number; a sequence counts once here, as its ratio does."""
    clip_low: float = Field(3e-4, ge=0, lt=1)
    """The sequence's ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(4e-4, ge=0)
    """The sequence's ratio is clipped above 1 + clip_high."""

    whole_sequences: ClassVar[bool] = True


class GspoTokenLossConfig(PolicyLossBase):
    """GSPO whose tokens may differ in their advantages (arXiv 2507.18071)."""

    name: Literal["gspo_token"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """How per-token losses become one number; a sequence counts once here, as its ratio does."""
    clip_low: float = Field(3e-4, ge=0, lt=1)
    """The sequence's ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(4e-4, ge=0)
    """The sequence's ratio is clipped above 1 + clip_high."""


class GmpoLossConfig(PolicyLossBase):
    """Geometric mean of clipped ratios (Zhao et al. 2025, arXiv 2507.20673)."""

    name: Literal["gmpo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """How per-token losses become one number; a sequence counts once here, as its mean of ratios does."""
    clip_low: float = Field(0.4, ge=0)
    """The logarithm of a token's ratio is clipped below -clip_low."""
    clip_high: float = Field(0.4, ge=0)
    """The logarithm of a token's ratio is clipped above clip_high."""

    whole_sequences: ClassVar[bool] = True


class CispoLossConfig(PolicyLossBase):
    """REINFORCE weighted by a clipped ratio, which has no gradient (MiniMax 2025, arXiv 2506.13585)."""

    name: Literal["cispo"]
    clip_low: float | None = Field(None, ge=0, lt=1)
    """The weight is at least 1 - clip_low; no lower bound when not given, as in the paper."""
    clip_high: float = Field(4.0, ge=0)
    """The weight is at most 1 + clip_high; TRL's epsilon_high is this bound itself."""


class SapoLossConfig(PolicyLossBase):
    """A sigmoid gate instead of clipping (Gao et al. 2025, arXiv 2511.20347)."""

    name: Literal["sapo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """How per-token losses become one number; a sequence counts once here, as in the paper."""
    temperature_positive: float = Field(1.0, gt=0)
    """Steepness of the gate where the advantage is positive."""
    temperature_negative: float = Field(1.05, gt=0)
    """The same elsewhere; larger ones let the gradient fade faster with distance."""

    figures: ClassVar[frozenset[str]] = _RATIO


class ReinforceLossConfig(PolicyLossBase):
    """`-A log p` (Williams 1992): no ratio and no clipping, as in RLOO, ReMax, OPO and GPG."""

    name: Literal["reinforce"]

    has_ratio: ClassVar[bool] = False
    figures: ClassVar[frozenset[str]] = frozenset()


class ClipCovLossConfig(PolicyLossBase):
    """PPO's loss, which leaves out some tokens of high covariance (Cui et al. 2025, arXiv 2505.22617)."""

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

    selects_tokens: ClassVar[bool] = True
    figures: ClassVar[frozenset[str]] = _RATIO | _CLIPPED | {"selected_fraction"}


class KlCovLossConfig(PolicyLossBase):
    """Tokens of the highest covariance are held near the old policy (arXiv 2505.22617)."""

    name: Literal["kl_cov"]
    fraction: float = Field(2e-4, gt=0, le=1)
    """Tokens of an update that are held."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of their distance from the old policy."""

    selects_tokens: ClassVar[bool] = True
    figures: ClassVar[frozenset[str]] = _RATIO | {"selected_fraction"}


class CustomLossConfig(PolicyLossBase):
    """A function of your own (docs/algorithms.md)."""

    name: Literal["custom"]
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments bound to the function."""

    figures: ClassVar[frozenset[str]] = _RATIO


PolicyLossConfig = Annotated[
    ClipLossConfig
    | GspoLossConfig
    | GspoTokenLossConfig
    | GmpoLossConfig
    | CispoLossConfig
    | SapoLossConfig
    | ReinforceLossConfig
    | ClipCovLossConfig
    | KlCovLossConfig
    | CustomLossConfig,
    Field(discriminator="name"),
    default_variant(ClipLossConfig),
]
