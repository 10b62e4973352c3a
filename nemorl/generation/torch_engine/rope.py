"""Rotating queries and keys by the angles of their positions."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Factors for some positions, as `nemorl.models.rope.RotaryTable` gives them."""

    cos: Tensor  # [N, 1, head_dim]
    sin: Tensor  # [N, 1, head_dim]

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys [N, heads, head_dim]."""
        rolled = heads.roll(heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * self.cos, rolled, self.sin)
