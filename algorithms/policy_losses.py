"""Losses of a policy on samples of that policy, one pure function each.

They take a packed micro-batch with the logprobs of the policy that learns, the `old` ones of the ratio, and
advantages, all [N] float32, and return the loss of each token. Masks, weights and sums are in
`objective.py` and `losses.py`. In `gspo` and `gmpo` a sequence has one ratio, made of
those of all its sampled tokens; in the others each token has one, or none. A new built-in loss is a config in
`nemorl/config/algorithm/losses.py`, a function here and a line in `_LOSSES`.

Clip-Cov and KL-Cov (Cui et al. 2025, "The Entropy Mechanism", arXiv 2505.22617).

The entropy falls most by the tokens whose logprob and advantage have a high covariance,

    cov_t = (log p_t - mean of log p) (A_t - mean of A)

over all sampled tokens of an update. So the few tokens in question can be known only when all of them are
seen: `choose` does this once for each update, over all data-parallel ranks, and its result decides for every
token separately. No split into micro-batches or ranks changes that. The logprobs are the
old ones: before the first update of a step these are the current ones, as in the paper.

`least_entropy` selects the tokens of the highest entropy. A custom policy loss is a function with an import
path; `smoke_test_loss` calls it before a run starts.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from nemorl.config.algorithm.losses import (
    CispoLossConfig,
    ClipCovLossConfig,
    ClipLossConfig,
    CustomLossConfig,
    GmpoLossConfig,
    GspoLossConfig,
    GspoTokenLossConfig,
    KlCovLossConfig,
    PolicyLossBase,
    ReinforceLossConfig,
    SapoLossConfig,
)
from nemorl.data.packed import PackedBatch

from .custom import CustomFunctionError, find, num_positional, tried
from .objective import bounded_exp, log_ratio, sequence_means


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token and its metrics; values outside the loss mask are ignored."""

    loss: Tensor  # [N] float32, differentiable
    ratio: Tensor | None = None  # [N] current policy over old one, as the loss takes it
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # [N] each: reported as means over tokens


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """`-min(r A, clip(r, low, high) A)` [N], and where the clipping took the gradient away."""
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    metrics = {
        "clip_fraction/low": (ratio < low) & (advantages < 0),
        "clip_fraction/high": (ratio > high) & (advantages > 0),
    }
    return TokenLoss(loss, ratio, metrics)


def gspo(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor, config: GspoLossConfig
) -> TokenLoss:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071).

    `-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)` with `s = exp(mean of logprobs - old)` over the
    sampled tokens of a sequence. Each token carries its sequence's loss, so with `seq-mean-token-mean` the
    whole is the paper's mean over sequences; other aggregations weigh sequences by their lengths. The
    gradient goes through s, as in the paper and in OpenRLHF; for advantages that are equal within a sequence
    it is also that of `gspo_token`, which is verl's form. The mean logarithm is clamped at ±20 (verl: at most
    10).
    """
    ratio = bounded_exp(sequence_means(log_ratio(batch, logprobs, old), batch))
    return clipped_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high)


def gspo_token(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor, config: GspoTokenLossConfig
) -> TokenLoss:
    """GSPO-token (arXiv 2507.18071): as GSPO, for advantages of tokens.

    `-min(s_t A_t, clip(s_t) A_t)` with `s_t = sg[s] p_t / sg[p_t]`: the value of the sequence's ratio and the
    gradient of the token's logprob.
    """
    sequence = bounded_exp(sequence_means(log_ratio(batch, logprobs, old).detach(), batch))
    ratio = sequence * (logprobs - logprobs.detach()).exp()
    return clipped_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high)


def gmpo(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor, config: GmpoLossConfig
) -> TokenLoss:
    """GMPO (Zhao et al. 2025, arXiv 2507.20673): the geometric mean of clipped token ratios.

    `-A exp(mean of x_t)`, where `x_t = min(log r_t, clip_high)` if `A > 0`, else `max(log r_t, -clip_low)`:
    the bounds are of the logarithm, so 0.4 is the paper's (e^-0.4, e^0.4). Clipping is of tokens, and
    one token that is clipped leaves the others their gradient. Advantages are of sequences; where tokens
    differ, each keeps its own as in `gspo` (verl takes their mean).
    """
    log = log_ratio(batch, logprobs, old)
    positive = advantages > 0
    clipped = torch.where(positive, log.clamp(max=config.clip_high), log.clamp(min=-config.clip_low))
    ratio = bounded_exp(sequence_means(clipped, batch))
    metrics = {
        "clip_fraction/low": (log < -config.clip_low) & (advantages < 0),
        "clip_fraction/high": (log > config.clip_high) & positive,
    }
    return TokenLoss(-ratio * advantages, ratio, metrics)


def clip(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor, config: ClipLossConfig
) -> TokenLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347).

    `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(logprobs - old)`; different bounds are
    DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476). With `dual_clip` c, where `A < 0`, the loss is at
    most `-c A`, and has no gradient there (Ye et al. 2020, arXiv 1912.09729; verl's
    `clip_ratio_c`, TRL's `delta`).
    """
    ratio = bounded_exp(log_ratio(batch, logprobs, old))
    found = clipped_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high)
    if config.dual_clip is None:
        return found
    cut = (ratio > config.dual_clip) & (advantages < 0)
    loss = torch.where(cut, -config.dual_clip * advantages, found.loss)
    return replace(found, loss=loss, metrics={**found.metrics, "clip_fraction/dual": cut})


def cispo(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor, config: CispoLossConfig
) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585): no token loses its gradient.

    `-sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprob`, where sg stops the gradient. As in the paper there
    is no lower bound unless `clip_low` is given. verl's bounds are ours; TRL's `epsilon_high` is `1 +
    clip_high`; ART's defaults are clip_low 1 (none) and clip_high 4.
    """
    ratio = bounded_exp(log_ratio(batch, logprobs, old).detach())
    low = 0.0 if config.clip_low is None else 1 - config.clip_low
    high = 1 + config.clip_high
    metrics = {"clip_fraction/low": ratio < low, "clip_fraction/high": ratio > high}
    return TokenLoss(-ratio.clamp(low, high) * advantages * logprobs, ratio, metrics)


def sapo(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor, config: SapoLossConfig
) -> TokenLoss:
    """SAPO (Gao et al. 2025, arXiv 2511.20347): a gate whose gradient fades with the distance from r = 1.

    `-(4 / t) sigmoid(t (r - 1)) A`, with t of the advantage's sign; the gate's slope at r = 1 is 1, so that
    the gradient is the policy gradient's on policy.
    """
    ratio = bounded_exp(log_ratio(batch, logprobs, old))
    temperature = torch.where(advantages > 0, config.temperature_positive, config.temperature_negative)
    return TokenLoss(-4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages, ratio)


def reinforce(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor, config: ReinforceLossConfig
) -> TokenLoss:
    """`-A logprob` (Williams 1992): no ratio, so `old` is not looked at; later minibatches are off policy.

    What papers with a plain policy gradient have: RLOO (Ahmadian et al. 2024, arXiv 2402.14740), ReMax (Li
    et al. 2023, arXiv 2310.10505), GPG (Chu et al. 2025, arXiv 2504.02546), OPO (Hao et al. 2025, arXiv
    2505.23585).
    """
    return TokenLoss(-advantages * logprobs)


MIN_POSITIVE = math.ulp(0.0)  # what is at least this is more than 0

# Values [n] of this rank's tokens, to those of all data-parallel ranks [sum of n].
OverRanks = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Choice:
    """Which tokens of an update are chosen: those of a covariance within bounds, and of these the first by
    `draws` up to a limit.
    """

    mean_logprob: float
    mean_advantage: float
    low: float  # least covariance
    high: float  # largest covariance
    last_draw: int | None = None  # the largest draw that is chosen; None takes all

    def of(self, batch: PackedBatch, old: Tensor, advantages: Tensor) -> Tensor:
        """[N] bool."""
        covariance = _covariance(old, advantages, self.mean_logprob, self.mean_advantage)
        chosen = batch.loss_mask & (covariance >= self.low) & (covariance <= self.high)
        return chosen if self.last_draw is None else chosen & (draws(batch) <= self.last_draw)


def choose(batch: PackedBatch, old: Tensor, config: PolicyLossBase, over_ranks: OverRanks) -> Choice | None:
    """From this rank's part of an update; None where no token is chosen at all.

    At most `fraction` of all sampled tokens, rounded down, but one at least as in the paper's code and verl.
    Clip-Cov draws among the tokens within its bounds; the paper draws at random, here a token's draw is made
    of the tokens up to it, so that it is the same under every layout and after a resume. KL-Cov takes the
    highest, of positive ones alone: where all advantages are equal there are none.
    """
    assert isinstance(config, ClipCovLossConfig | KlCovLossConfig), (
        f"{type(config).__name__} selects no tokens"
    )
    assert batch.advantages is not None, "a choice by covariance requires advantages"
    mask = batch.loss_mask
    logprobs, advantages = over_ranks(old[mask].double()), over_ranks(batch.advantages[mask].double())
    if len(logprobs) == 0:
        return None
    count = max(1, int(config.fraction * len(logprobs)))
    means = float(logprobs.mean()), float(advantages.mean())
    covariance = _covariance(logprobs, advantages, *means)
    if isinstance(config, KlCovLossConfig):
        border = float(covariance.topk(count).values[-1])
        return Choice(*means, low=max(border, MIN_POSITIVE), high=float("inf"))
    drawn = over_ranks(draws(batch)[mask])
    within = drawn[(covariance >= config.covariance_low) & (covariance <= config.covariance_high)]
    if len(within) == 0:
        return None
    last = int(within.sort().values[min(count, len(within)) - 1])
    return Choice(*means, low=config.covariance_low, high=config.covariance_high, last_draw=last)


def clip_cov(
    batch: PackedBatch,
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    config: ClipCovLossConfig,
    choice: Choice | None,
) -> TokenLoss:
    """PPO's clipped surrogate (`clip`), but 0 and without gradient for the chosen tokens.

    These count among the tokens that divide the sum. The draw is among all tokens within the bounds, also
    those that PPO clips already; verl draws among the others. In the first update of a step, where Clip-Cov's
    preset has its only one, none is clipped and both are the same.
    """
    ratio = bounded_exp(log_ratio(batch, logprobs, old))
    found = clipped_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high)
    chosen = _chosen(choice, batch, old, advantages)
    loss = torch.where(chosen, torch.zeros_like(found.loss), found.loss)
    return replace(found, loss=loss, metrics={**found.metrics, "selected_fraction": chosen})


def kl_cov(
    batch: PackedBatch,
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    config: KlCovLossConfig,
    choice: Choice | None,
) -> TokenLoss:
    """`-r A`, not clipped, and for the chosen tokens `-r A + coefficient |logprob - old|`.

    The paper writes the divergence of the old policy from the current one; its code and verl, and so we, take
    the absolute difference of the logprobs for it. It has no gradient at r = 1: the first minibatch of a step
    feels nothing of it.
    """
    log = log_ratio(batch, logprobs, old)
    ratio = bounded_exp(log)
    chosen = _chosen(choice, batch, old, advantages)
    loss = -ratio * advantages + config.coefficient * log.abs() * chosen
    return TokenLoss(loss, ratio, {"selected_fraction": chosen})


def draws(batch: PackedBatch) -> Tensor:
    """[N] int64: a number for each token, as if drawn, that only the tokens of its sequence up to it decide.

    Equal beginnings of two samples have equal draws.
    """
    terms = _mixed(batch.tokens * _ODD + batch.position_ids)
    sums = terms.cumsum(0)
    before = (sums - terms)[batch.cu_seqlens[:-1].long()]
    lengths = torch.diff(batch.cu_seqlens).long()
    return _mixed(sums - before.repeat_interleave(lengths, output_size=batch.num_tokens))


_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: 2^64 over the golden ratio


def _mixed(x: Tensor) -> Tensor:
    """Integers whose bits all depend on all bits of `x`; 64-bit arithmetic that wraps around."""
    for shift in (30, 27):
        x = (x ^ _shifted(x, shift)) * _ODD
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left, which torch's own shift of signed numbers does not bring."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _covariance(logprobs: Tensor, advantages: Tensor, mean_logprob: float, mean_advantage: float) -> Tensor:
    """In float64, so that a token has the same one on every rank."""
    return (logprobs.double() - mean_logprob) * (advantages.double() - mean_advantage)


def _chosen(choice: Choice | None, batch: PackedBatch, old: Tensor, advantages: Tensor) -> Tensor:
    return torch.zeros_like(batch.loss_mask) if choice is None else choice.of(batch, old, advantages)


def least_entropy(batch: PackedBatch, quantile: float, over_ranks: OverRanks) -> float:
    """The smallest entropy among the `quantile` of an update's tokens that has the highest ones.

    "Beyond the 80/20 rule" (Wang et al. 2025, arXiv 2506.01939); `batch` is this rank's part. At least one
    token is above it, and of equals all: `1 + floor(quantile (n - 1))` of n different ones, which is what
    TRL's `top_entropy_quantile` takes. Its border is a micro-batch's; ours is the update's, so that no split
    changes the loss, and the entropies are those before the updates of the step.
    """
    assert batch.old_entropies is not None, "a choice by entropy requires those before the updates"
    entropies = over_ranks(batch.old_entropies[batch.loss_mask])
    if len(entropies) == 0:
        return 0.0
    return float(entropies.topk(1 + int(quantile * (len(entropies) - 1))).values[-1])


LossFunction = Callable[..., TokenLoss]
F = TypeVar("F", bound=LossFunction)

_SUMS = frozenset({"tokens", "ratio/square"})  # parts of metrics
_LOSS_SIGNATURE = "(batch, logprobs, old, advantages, **arguments) -> TokenLoss"


def policy_loss(function: F) -> F:
    """Mark a function as a policy loss; its signature is checked where it is defined.

    It is called as `function(batch, logprobs, old, advantages, **arguments)`, the tensors [N] float32 of one
    micro-batch, and returns a `TokenLoss`. `logprobs` are of the policy that learns; `old` has no gradient
    and is of the one that the ratio is taken against. It must be pure: it runs once for every micro-batch, on
    every rank that computes losses. Raises CustomFunctionError.
    """
    given = num_positional(function)
    if given < 4:
        raise _error(
            function.__qualname__,
            f"it takes {given} positional arguments: a policy loss is called as {_LOSS_SIGNATURE}",
        )
    return function


def own_loss(config: CustomLossConfig) -> LossFunction:
    """The function that a config names. Raises CustomFunctionError."""
    return find("policy loss", config.function)


def smoke_test_loss(config: CustomLossConfig, taken: Collection[str] = ()) -> None:
    """Call a function as training would, on a batch of two sequences.

    What it returns must have a finite loss [N], a gradient that reaches the logprobs of sampled tokens, and
    metrics [N] with names other than those `taken` by metrics of the run. Raises CustomFunctionError if it
    cannot be found or called, fails, or returns something else.
    """
    batch = _tiny_batch()
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    logprobs = (batch.old_logprobs + 0.1).requires_grad_()
    found = tried(
        own_loss(config),
        [batch, logprobs, batch.old_logprobs, batch.advantages],
        config.arguments,
        called=f"policy loss `{config.function}`",
        signature=f"{_LOSS_SIGNATURE} with algorithm.loss.arguments",
        where="a tiny batch of packed tensors [N]",
    )
    if problem := _loss_problem(found, logprobs, batch.loss_mask):
        raise _error(config.function, problem)
    for name in found.metrics:
        if name in taken or name in _SUMS:
            problem = f"its metric {name} has the name of a metric of the run: rename it"
            raise _error(config.function, problem)


def custom_loss(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor, config: CustomLossConfig
) -> TokenLoss:
    """The loss of a function of the user's.

    Raises CustomFunctionError if the function does not return tensors [N], or raises SystemExit.
    """
    try:
        found = own_loss(config)(batch, logprobs, old, advantages, **config.arguments)
    except SystemExit as error:  # which would end the worker without a message
        raise _error(config.function, f"it raised SystemExit: {error} (algorithm.loss.function)") from error
    if problem := _form(found, logprobs):
        raise _error(config.function, f"{problem} (algorithm.loss.function)")
    return found


def _loss_problem(found: object, logprobs: Tensor, mask: Tensor) -> str | None:
    if problem := _form(found, logprobs):
        return problem
    assert isinstance(found, TokenLoss)
    if not bool(found.loss[mask].isfinite().all()):
        return (
            "its loss is not finite where logprobs are near the old ones: look for logarithms and divisions"
        )
    if not found.loss.requires_grad:
        return (
            "no gradient reaches the logprobs: compute the loss from `logprobs`, without detaching all of it"
        )
    (gradient,) = torch.autograd.grad(found.loss[mask].sum(), logprobs, allow_unused=True)
    if gradient is None or not bool(gradient[mask].any()):
        return "its gradient is 0 at every sampled token: compute the loss from `logprobs`"
    return None


def _form(found: object, logprobs: Tensor) -> str | None:
    if not isinstance(found, TokenLoss):
        return f"it returned {type(found).__name__}: return a TokenLoss (nemorl.algorithms.policy_losses)"
    parts: dict[str, object] = {"loss": found.loss, **{f"metric {k}": v for k, v in found.metrics.items()}}
    if found.ratio is not None:
        parts["ratio"] = found.ratio
    for what, values in parts.items():
        if not isinstance(values, Tensor):
            return f"its {what} is of the type {type(values).__name__}: give a tensor [N]"
        if values.shape != logprobs.shape:
            shape, expected = list(values.shape), list(logprobs.shape)
            return f"its {what} has the shape {shape} instead of {expected}: give a value for each token"
    return None


def _tiny_batch() -> PackedBatch:
    """Two sequences, of three and two tokens, whose first tokens are prompts."""
    mask = torch.tensor([False, True, True, False, True])
    return PackedBatch(
        tokens=torch.arange(5),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        position_ids=torch.tensor([0, 1, 2, 0, 1]),
        loss_mask=mask,
        weights=mask / 3,
        advantages=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5]) * mask,
        logprobs=torch.full((5,), -1.0) * mask,
        old_logprobs=torch.full((5,), -1.0) * mask,
    )


def _error(name: str, problem: str) -> CustomFunctionError:
    return CustomFunctionError(f"policy loss `{name}`: {problem}")


_LOSSES: Mapping[type[PolicyLossBase], LossFunction] = {
    ClipLossConfig: clip,
    GspoLossConfig: gspo,
    GspoTokenLossConfig: gspo_token,
    GmpoLossConfig: gmpo,
    CispoLossConfig: cispo,
    SapoLossConfig: sapo,
    ReinforceLossConfig: reinforce,
    ClipCovLossConfig: clip_cov,
    KlCovLossConfig: kl_cov,
    CustomLossConfig: custom_loss,
}


def token_loss(
    config: PolicyLossBase,
    batch: PackedBatch,
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    choice: Choice | None = None,
) -> TokenLoss:
    """The loss that the config names; `choice` is the result of `choose` for losses that select tokens."""
    selected = {"choice": choice} if config.selects_tokens else {}
    return _LOSSES[type(config)](batch, logprobs, old, advantages, config, **selected)
