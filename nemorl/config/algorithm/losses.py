"""The loss of a policy on its own samples.

Losses of two answers to one prompt, of which one is better.

What is compared are logprobs of whole answers: `x = log policy` of an answer, less `log reference` where the
loss keeps a reference; `delta` is x of the chosen less x of the rejected.
"""

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
    metrics: ClassVar[frozenset[str]] = _RATIO | _CLIPPED  # what it writes beside `loss/policy`

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

    metrics: ClassVar[frozenset[str]] = _RATIO | _CLIPPED | {"clip_fraction/dual"}


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

    metrics: ClassVar[frozenset[str]] = _RATIO


class ReinforceLossConfig(PolicyLossBase):
    """`-A log p` (Williams 1992): no ratio and no clipping, as in RLOO, ReMax, OPO and GPG."""

    name: Literal["reinforce"]

    has_ratio: ClassVar[bool] = False
    metrics: ClassVar[frozenset[str]] = frozenset()


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
    metrics: ClassVar[frozenset[str]] = _RATIO | _CLIPPED | {"selected_fraction"}


class KlCovLossConfig(PolicyLossBase):
    """Tokens of the highest covariance are held near the old policy (arXiv 2505.22617)."""

    name: Literal["kl_cov"]
    fraction: float = Field(2e-4, gt=0, le=1)
    """Tokens of an update that are held."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of their distance from the old policy."""

    selects_tokens: ClassVar[bool] = True
    metrics: ClassVar[frozenset[str]] = _RATIO | {"selected_fraction"}


class CustomLossConfig(PolicyLossBase):
    """A function of your own (docs/algorithms.md)."""

    name: Literal["custom"]
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments bound to the function."""

    metrics: ClassVar[frozenset[str]] = _RATIO


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


class PairLossBase(Config):
    """What all losses of pairs share."""

    beta: float = Field(0.1, gt=0)
    """How much a difference of logprobs counts; of losses with a reference, the weight of staying near it."""
    logprobs: Literal["sum", "mean"] = "sum"
    """Of an answer's tokens: their sum, which is the answer's logprob, or their mean, free of its length."""

    @property
    def keeps_reference(self) -> bool:
        """Whether logprobs are taken relative to the reference."""
        return True


class LogisticLossConfig(PairLossBase):
    """`-log sigmoid(beta delta - gamma)` (DPO, Rafailov et al. 2023, arXiv 2305.18290).

    Without a reference and with means it is SimPO (Meng et al. 2024, arXiv 2405.14734); smoothed, cDPO
    (Mitchell 2023); with the data's margins, ODPO (Amini et al. 2024, arXiv 2402.10571).
    """

    name: Literal["logistic"] = "logistic"
    reference: bool = True
    """Take logprobs relative to the reference policy."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Chance that a label is wrong: that much of the loss is of the pair the other way round."""
    gamma: float = Field(0.0, ge=0)
    """Margin by which the chosen has to win, in units of the loss's argument."""
    margin_scale: float = Field(0.0, ge=0)
    """Added to gamma for each unit of the pair's own margin, which `data.*.margin_key` names."""

    @property
    def keeps_reference(self) -> bool:
        """As it says."""
        return self.reference


class RobustLossConfig(PairLossBase):
    """DPO's loss, unbiased where labels are wrong by chance (Chowdhury et al. 2024, arXiv 2403.00409)."""

    name: Literal["robust"]
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Chance that a label is wrong."""


class SquaredLossConfig(PairLossBase):
    """`(delta - 1 / (2 beta))^2` (IPO, Azar et al. 2023, arXiv 2310.12036; beta is its tau).

    The paper writes sums; its authors advise means, which is what most implementations compute.
    """

    name: Literal["squared"]
    logprobs: Literal["sum", "mean"] = "mean"
    """Of an answer's tokens: their sum, as in the paper's formula, or their mean."""


class HingeLossConfig(PairLossBase):
    """`max(0, margin - beta delta)` (RSO, Liu et al. 2023, arXiv 2309.06657).

    Without a reference it is SLiC's calibration (Zhao et al. 2023, arXiv 2305.10425).
    """

    name: Literal["hinge"]
    reference: bool = True
    """Take logprobs relative to the reference policy."""
    margin: float = Field(1.0, gt=0)
    """By how much the chosen has to win; beyond that a pair teaches nothing."""

    @property
    def keeps_reference(self) -> bool:
        """As it says."""
        return self.reference


class OddsRatioLossConfig(PairLossBase):
    """`-beta log sigmoid(log odds of the chosen - log odds of the rejected)` of mean logprobs.

    ORPO (Hong et al. 2024, arXiv 2403.07691; beta is its lambda); it belongs to an SFT term.
    """

    name: Literal["odds_ratio"]
    logprobs: Literal["mean"] = "mean"
    """Odds are of the mean."""

    @property
    def keeps_reference(self) -> bool:
        """It has none."""
        return False


class AnchoredLossConfig(PairLossBase):
    """Each answer against the reference (APO, D'Oosterlinck et al. 2024, arXiv 2408.06266).

    `zero` raises the chosen and lowers the rejected: `1 - sigmoid(beta x_chosen) + sigmoid(beta x_rejected)`.
    `down` lowers both, the rejected more: `sigmoid(beta x_chosen) + 1 - sigmoid(beta delta)`.
    """

    name: Literal["anchored"]
    anchor: Literal["zero", "down"] = "zero"
    """`zero` where chosen answers are better than the policy's own, `down` where they are worse."""


PairLossConfig = Annotated[
    LogisticLossConfig
    | RobustLossConfig
    | SquaredLossConfig
    | HingeLossConfig
    | OddsRatioLossConfig
    | AnchoredLossConfig,
    Field(discriminator="name"),
    default_variant(LogisticLossConfig),
]
