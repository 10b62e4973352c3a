"""Losses in which a sequence has one ratio, made of those of all its sampled tokens."""

import torch
from torch import Tensor

from nemorl.algorithms.sequences import sequence_means
from nemorl.config.algorithm import GmpoLossConfig, GspoLossConfig, GspoTokenLossConfig
from nemorl.data.packed import PackedBatch

from .tokens import TokenLoss, bounded_exp, clipped_surrogate, log_ratio


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
    the bounds are of the logarithm, so 0.4 stands for the paper's (e^-0.4, e^0.4). Clipping is of tokens, and
    one token that is clipped leaves the others their gradient. Advantages are of sequences; where tokens
    differ, each keeps its own as in `gspo` (verl takes their mean).
    """
    log = log_ratio(batch, logprobs, old)
    positive = advantages > 0
    clipped = torch.where(positive, log.clamp(max=config.clip_high), log.clamp(min=-config.clip_low))
    ratio = bounded_exp(sequence_means(clipped, batch))
    figures = {
        "clip_fraction/low": (log < -config.clip_low) & (advantages < 0),
        "clip_fraction/high": (log > config.clip_high) & positive,
    }
    return TokenLoss(-ratio * advantages, ratio, figures)
