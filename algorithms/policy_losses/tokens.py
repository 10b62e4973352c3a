"""What every policy loss is made of: the term of a token, and the ratio to the policy before."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemorl.data.packed import PackedBatch

# Beyond this the ratio carries no information and its exponential overflows in float32.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token and what is told about it; nothing is looked at outside the loss mask."""

    loss: Tensor  # [N] float32, differentiable
    ratio: Tensor | None = None  # [N] current policy over old one, as the loss takes it
    figures: Mapping[str, Tensor] = field(default_factory=dict)  # [N] each: their means over tokens are told


def log_ratio(batch: PackedBatch, logprobs: Tensor, old: Tensor) -> Tensor:
    """`logprobs - old` [N], and 0 outside the loss mask."""
    return torch.where(batch.loss_mask, logprobs - old, torch.zeros_like(logprobs))


def bounded_exp(log: Tensor) -> Tensor:
    """The exponential of what is clamped to ±MAX_LOG_RATIO, without gradient beyond, as verl and OpenRLHF."""
    return log.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """`-min(r A, clip(r, low, high) A)` [N], and where the clipping took the gradient away."""
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    figures = {
        "clip_fraction/low": (ratio < low) & (advantages < 0),
        "clip_fraction/high": (ratio > high) & (advantages > 0),
    }
    return TokenLoss(loss, ratio, figures)
