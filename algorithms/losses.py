"""Losses per token, summed with the weights of the batch (`aggregation.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl.config.algorithm import ClipLossConfig, KLConfig
from nemorl.data.losses import LossOutput
from nemorl.data.packed import PackedBatch

# Beyond this the ratio carries no information and its exponential overflows in float32.
MAX_LOG_RATIO = 20.0


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per token and the ratio, both [N] (Schulman et al. 2017, arXiv 1707.06347).

    `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(logprobs - old_logprobs)`, equation 7;
    different bounds are DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476).
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages), ratio


def kl_divergence(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) per token [N] (Schulman 2020, "Approximating KL divergence").

    With `x = log policy - log reference`: k1 is `x`, k2 `x^2 / 2`, k3 `exp(-x) - 1 + x`.
    """
    x = (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return (-x).exp() - 1 + x
    raise ValueError(f"KL estimator is {estimator!r}; k1, k2 and k3 are known")


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped policy gradient, with divergence from the reference and an entropy bonus where weighed."""

    config: ClipLossConfig
    kl: KLConfig = KLConfig()
    needs_entropy: bool = True  # also a metric: a collapsing policy shows there first

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """Needs `advantages`; `old_logprobs` default to the current ones (one update per batch: ratio 1)."""
        assert batch.advantages is not None, "the policy loss wants advantages"
        assert entropy is not None, "the policy loss wants the entropy"
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        surrogate, ratio = clipped_policy_loss(
            logprobs, old, batch.advantages, self.config.clip_low, self.config.clip_high
        )
        token_loss = surrogate - self.config.entropy_coefficient * entropy
        mask = batch.loss_mask
        sums = {
            "loss/policy": (batch.weights * surrogate).sum(),
            "tokens": mask.sum(),
            "entropy": (entropy * mask).sum(),
            "ratio/mean": (ratio * mask).sum(),
            "clip_fraction/low": ((ratio < 1 - self.config.clip_low) & (batch.advantages < 0) & mask).sum(),
            "clip_fraction/high": ((ratio > 1 + self.config.clip_high) & (batch.advantages > 0) & mask).sum(),
        }
        maxima = {}
        if batch.logprobs is not None:
            gap = ((logprobs - batch.logprobs) * mask).abs()
            sums["logprob_gap/mean"] = gap.sum()
            maxima["logprob_gap/max"] = gap.max()
        if batch.reference_logprobs is not None:
            divergence = kl_divergence(logprobs, batch.reference_logprobs, self.kl.estimator)
            token_loss = token_loss + self.kl.coefficient * divergence
            sums["kl/reference"] = (divergence * mask).sum()
        loss = (batch.weights * token_loss).sum()
        sums["loss/total"] = loss
        return LossOutput(loss, _detached(sums), _detached(maxima))


@dataclass(frozen=True)
class CrossEntropyLoss:
    """Negative logprob of the data: supervised fine-tuning."""

    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """Sum of `-weight * logprob` over the tokens of the loss mask."""
        loss = -(batch.weights * logprobs).sum()
        sums = {"loss/sft": loss, "tokens": batch.loss_mask.sum(), "nll": -(logprobs * batch.loss_mask).sum()}
        return LossOutput(loss, _detached(sums), {})


def finish_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics of one optimizer step from global sums: losses stay sums, the rest are means over tokens."""
    tokens = max(sums["tokens"], 1.0)
    means = {k: v if k.startswith("loss/") else v / tokens for k, v in sums.items() if k != "tokens"}
    return {**means, **maxima}


def _detached(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().float() for name, value in values.items()}
