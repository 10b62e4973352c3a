"""Clip-Cov and KL-Cov (Cui et al. 2025, "The Entropy Mechanism", arXiv 2505.22617).

The entropy falls most by the tokens whose logprob and advantage have a high covariance,

    cov_t = (log p_t - mean of log p) (A_t - mean of A)

over all sampled tokens of an update. So the few tokens in question can be known only when all of them are
seen: `choose` does this once for each update, over all data-parallel ranks, and what it found says of every
token by itself whether it is chosen. No split into micro-batches or ranks changes that. The logprobs are the
old ones: before the first update of a step these are the current ones, of which the paper speaks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemorl.config.algorithm import ClipCovLossConfig, KlCovLossConfig
from nemorl.data.packed import PackedBatch

from .tokens import TokenLoss, bounded_exp, clipped_surrogate, log_ratio

LEAST_POSITIVE = math.ulp(0.0)  # what is at least this is more than 0

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


def choose(
    batch: PackedBatch, old: Tensor, config: ClipCovLossConfig | KlCovLossConfig, over_ranks: OverRanks
) -> Choice | None:
    """From this rank's part of an update; None where no token is chosen at all.

    At most `fraction` of all sampled tokens, rounded down, but one at least as in the paper's code and verl.
    Clip-Cov draws among the tokens within its bounds; the paper draws at random, here a token's draw is made
    of the tokens up to it, so that it is the same under every layout and after a resume. KL-Cov takes the
    highest, of positive ones alone: where all advantages are equal there are none.
    """
    assert batch.advantages is not None, "a choice by covariance wants advantages"
    mask = batch.loss_mask
    logprobs, advantages = over_ranks(old[mask].double()), over_ranks(batch.advantages[mask].double())
    if len(logprobs) == 0:
        return None
    count = max(1, int(config.fraction * len(logprobs)))
    means = float(logprobs.mean()), float(advantages.mean())
    covariance = _covariance(logprobs, advantages, *means)
    if isinstance(config, KlCovLossConfig):
        border = float(covariance.topk(count).values[-1])
        return Choice(*means, low=max(border, LEAST_POSITIVE), high=float("inf"))
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
    return replace(found, loss=loss, figures={**found.figures, "selected_fraction": chosen})


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
    """In float64, so that a token has the same one wherever it is computed."""
    return (logprobs.double() - mean_logprob) * (advantages.double() - mean_advantage)


def _chosen(choice: Choice | None, batch: PackedBatch, old: Tensor, advantages: Tensor) -> Tensor:
    return torch.zeros_like(batch.loss_mask) if choice is None else choice.of(batch, old, advantages)
