"""Losses in which each token has a ratio, or none, of its own."""

from dataclasses import replace

import torch
from torch import Tensor

from nemorl.config.algorithm import CispoLossConfig, ClipLossConfig, ReinforceLossConfig, SapoLossConfig
from nemorl.data.packed import PackedBatch

from .tokens import TokenLoss, bounded_exp, clipped_surrogate, log_ratio


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
    return replace(found, loss=loss, figures={**found.figures, "clip_fraction/dual": cut})


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
    figures = {"clip_fraction/low": ratio < low, "clip_fraction/high": ratio > high}
    return TokenLoss(-ratio.clamp(low, high) * advantages * logprobs, ratio, figures)


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
