"""Rotary position embeddings (Su et al., https://arxiv.org/abs/2104.09864), in the HF halves convention."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nemorl.models.shape import ModelShape


class Rotation(NamedTuple):
    """Factors for some positions; `sin` carries the sign, so that rotating is `x cos + roll(x) sin`."""

    cos: Tensor  # [N, 1, head_dim]
    sin: Tensor  # [N, 1, head_dim]

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys [N, heads, head_dim]."""
        rolled = heads.roll(heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * self.cos, rolled, self.sin)


class RotaryTable:
    """Cosines and sines of every position a sequence can have."""

    def __init__(
        self, shape: ModelShape, max_positions: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(shape))
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).unsqueeze(1).to(device, dtype)  # [positions, 1, head_dim]
        self._sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(device, dtype)

    def at(self, positions: Tensor) -> Rotation:
        """The factors of `positions` [N]."""
        return Rotation(self._cos[positions], self._sin[positions])


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Radians per position of each pair of channels, [head_dim / 2], in float32 as transformers has them."""
    channels = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / shape.rope_theta ** (channels / shape.head_dim)
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    # Wavelengths the model saw many times in a context stay, those longer than the context are stretched by
    # `factor`, and those between are interpolated (Llama 3, arXiv 2407.21783, section 3.4).
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
