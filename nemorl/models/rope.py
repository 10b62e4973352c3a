"""Rotary position embeddings (arXiv 2104.09864) in Hugging Face's halves, for trainer and engine."""

import math

import torch
from torch import Tensor

from .shape import LinearRopeScaling, Llama3RopeScaling, Rope, YarnRopeScaling


def inverse_frequencies(dim: int, rope: Rope) -> Tensor:
    """Radians per position of each pair of channels, [dim / 2], in float32 as transformers has them."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    match rope.scaling:
        case None:
            return frequencies
        case LinearRopeScaling():
            return frequencies / rope.scaling.factor
        case Llama3RopeScaling() as scaling:
            # Wavelengths the model saw many times in a context stay, those longer than the context are
            # stretched by `factor`, and those between are interpolated (arXiv 2407.21783).
            turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = ((turns - low) / (high - low)).clamp(0, 1)
        case YarnRopeScaling() as scaling:
            kept = _yarn_kept(dim, rope.theta, scaling)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def attention_factor(rope: Rope) -> float:
    return rope.scaling.attention_factor if isinstance(rope.scaling, YarnRopeScaling) else 1.0


def _yarn_kept(dim: int, theta: float, scaling: YarnRopeScaling) -> Tensor:
    """The share of each pair's frequency that remains, [dim / 2], from 1 to 0 (arXiv 2309.00071).

    Linear between the pairs that turn `beta_fast` and `beta_slow` times in the original context.
    """
    turns_of_first = scaling.original_max_position_embeddings / (2 * math.pi)
    times = (scaling.beta_fast, scaling.beta_slow)
    low, high = (dim / 2 * math.log(turns_of_first / t) / math.log(theta) for t in times)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # as in transformers, where the two are the same pair
    return 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


class RotaryTable:
    """Cosines and sines of all positions; `sin` carries the sign: rotating is `x cos + roll(x) sin`."""

    def __init__(
        self, dim: int, rope: Rope, *, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(dim, rope))
        factor = attention_factor(rope)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self._cos = torch.cat((cos, cos), -1).to(device, dtype)  # [max_positions, dim]
        self._sin = torch.cat((-sin, sin), -1).to(device, dtype)

    def at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [N, 1, dim] of the positions [N]."""
        return self._cos[position_ids].unsqueeze(1), self._sin[position_ids].unsqueeze(1)
