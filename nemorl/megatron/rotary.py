"""Rotating queries and keys of packed sequences, with a backward pass that saves only the angles."""

from typing import Any

import torch
from torch import Tensor


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
