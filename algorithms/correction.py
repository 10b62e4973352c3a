"""Correction of samples that another policy made than the one that learns (docs/off_policy.md).

Three policies have a part in a token: the engine's, which sampled it; the trainer's before the updates of the
step (old); and the current one. The losses' own ratio is current over old. What is left between old and
engine (other kernels, other precision, older weights) is corrected by a weight for the loss of each token.

    decoupled   weight of old / engine; ratio = current / old       (Hilton et al. 2021, arXiv 2110.00641)
    bypass      old := engine, so the ratio corrects both at once; masks compare current / engine

Whatever is left out stays among the tokens that divide the sum: a mask makes a term 0 and the others no
larger. Divergence and entropy terms are neither weighed nor left out. verl takes what its masks leave out
from the divisor, the divergence and the entropy too: `divisor: kept`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemorl.config.algorithm import (
    CorrectionConfig,
    IcePopCorrectionConfig,
    MaskedCorrectionConfig,
    NoCorrectionConfig,
    TruncatedCorrectionConfig,
)
from nemorl.data.packed import PackedBatch

from .aggregation import sequence_means, sequence_sums
from .policy_losses import bounded_exp, log_ratio


@dataclass(frozen=True)
class Corrected:
    """What the policy's loss of each token is multiplied by, without gradient."""

    weight: Tensor  # [N] float32
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # [N] each, reported as means over tokens
    largest: Mapping[str, Tensor] = field(default_factory=dict)  # [N] each, reported as maxima


@torch.no_grad()
def correct(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, config: CorrectionConfig, *, has_ratio: bool
) -> Corrected:
    """Weights for a loss of `logprobs` [N] whose ratio, if it `has_ratio`, is taken against `old` [N].

    In the bypass form the weight is of current over engine; a loss that has this as its ratio already takes
    from it only what is left out.
    """
    assert batch.logprobs is not None, "a correction requires the engine's logprobs"
    bypass = config.form == "bypass"
    token_log = log_ratio(batch, logprobs if bypass else old, batch.logprobs)
    weight = torch.ones_like(token_log)
    metrics: dict[str, Tensor] = {}
    largest: dict[str, Tensor] = {}
    if not isinstance(config, NoCorrectionConfig):
        ratio = bounded_exp(_at_level(token_log, batch, config.level))
        weight, touched = importance_weights(ratio, config)
        if bypass and has_ratio:
            weight = (weight > 0).float()
        metrics |= {"correction/ratio_mean": ratio, config.weight_metric: touched}
        largest |= {"correction/ratio_max": ratio}
    if config.sequence_mask is not None:
        mean = bounded_exp(sequence_means(token_log, batch))
        out = (mean < config.sequence_mask.low) | (mean > config.sequence_mask.high)
        weight = weight * ~out
        metrics["correction/masked_sequences"] = out
    if config.off_policy_threshold is not None:
        out = off_policy(batch, logprobs, config.off_policy_threshold)
        weight = weight * ~out
        metrics["correction/masked_off_policy"] = out
    if metrics:
        metrics |= {"correction/mean": weight, "correction/square": weight.square()}
    return Corrected(weight, metrics, largest)


@torch.no_grad()
def kept(batch: PackedBatch, config: CorrectionConfig) -> Tensor:
    """[N] bool: sampled tokens that neither bounds nor sequence mask leave out, in the decoupled form.

    That is known before the updates of a step; `off_policy_threshold` looks at the current policy.
    """
    assert batch.old_logprobs is not None, "a mask of tokens requires old logprobs"
    of_old = config.model_copy(update={"off_policy_threshold": None})
    old = batch.old_logprobs
    return batch.loss_mask & (correct(batch, old, old, of_old, has_ratio=True).weight > 0)


def importance_weights(
    ratio: Tensor, config: TruncatedCorrectionConfig | MaskedCorrectionConfig | IcePopCorrectionConfig
) -> tuple[Tensor, Tensor]:
    """Weights [N] of ratios [N], and which of them were cut or left out [N] bool.

    tis: `clamp(ratio, low, high)` (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"). mis: the ratio up to `high`, beyond it 0 (Liu et al. 2025, "When
    speed kills stability"). icepop: the ratio within `low` and `high`, otherwise 0 (arXiv 2510.18855).
    """
    match config:
        case TruncatedCorrectionConfig():
            return ratio.clamp(config.low, config.high), (ratio < config.low) | (ratio > config.high)
        case MaskedCorrectionConfig():
            out = ratio > config.high
        case IcePopCorrectionConfig():
            out = (ratio < config.low) | (ratio > config.high)
    return ratio * ~out, out


def off_policy(batch: PackedBatch, logprobs: Tensor, threshold: float) -> Tensor:
    """[N] bool: tokens left out by DeepSeek-V3.2's sequence mask (arXiv 2512.02556, equation 9).

    Those of negative advantage in sequences where the mean over sampled tokens of `engine - logprobs` is more
    than `threshold`. As the paper says, the sampling policy is the engine's by its own logprobs, so that the
    mask sees stale weights, several updates and other arithmetic all at once.
    """
    assert batch.logprobs is not None
    assert batch.advantages is not None
    drift = sequence_means(log_ratio(batch, batch.logprobs, logprobs), batch)
    return (batch.advantages < 0) & (drift > threshold)


def _at_level(token_log: Tensor, batch: PackedBatch, level: str) -> Tensor:
    """[N] logarithms of ratios, of tokens or the same for all tokens of a sequence."""
    match level:
        case "sequence":
            return sequence_sums(token_log, batch)
        case "geometric":
            return sequence_means(token_log, batch)
    return token_log
