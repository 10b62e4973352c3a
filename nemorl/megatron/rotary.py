"""Rotary position embedding for packed sequences: angles by position, once per micro-batch for all layers."""

import math
from typing import Any

import torch
from torch import Tensor

from nemorl.models.shape import Llama3RopeScaling


def inverse_frequencies(dim: int, theta: float, scaling: Llama3RopeScaling | None) -> Tensor:
    """Angles per position [dim / 2], float32: `theta ** (-2 i / dim)`, stretched where `scaling` says."""
    frequencies = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    # 0 where a wavelength is longer than low allows (stretched in full), 1 where it is short (kept).
    turns = scaling.original_max_position_embeddings / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class RotaryTable:
    """Cosines and sines of all positions, in the shape `rotate` wants."""

    def __init__(
        self,
        *,
        dim: int,
        theta: float,
        scaling: Llama3RopeScaling | None,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(dim, theta, scaling))
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), -1).to(device, dtype)  # [max_positions, dim]
        self._sin = torch.cat((-sin, sin), -1).to(device, dtype)

    def at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [N, 1, dim] of the positions [N]."""
        return self._cos[position_ids].unsqueeze(1), self._sin[position_ids].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs `(i, i + dim / 2)` of `x` [N, heads, dim] by the angles of `RotaryTable.at`."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]


class _Rotate(torch.autograd.Function):
    """Saves only the angles: the inverse of a rotation is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (grad,) = grads
        return (grad * cos).addcmul_(grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None
