"""Training with linear weights that are rounded to a format: quantization-aware training, weights only.

    forward     y = fold(W) x
    backward    dW = dy x^T, as if nothing were rounded (straight-through, arXiv 1308.3432)

The optimizer and checkpoints have W. Engines receive fold(W): they sample with the numbers of the trainer.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemorl.config.quantization import QuantizationConfig, QuantizationFormat
from nemorl.models.layout import PolicyRank, chunk_of, policy_slices
from nemorl.models.quantized import fold, linear_groups
from nemorl.models.shape import ModelShape
from nemorl.models.tensors import ComputedTensors


class FakeQuantization:
    """Rounds the weights of one rank. Under TP rows are divided, whose scales no rank knows alone."""

    def __init__(self, shape: ModelShape, config: QuantizationConfig, rank: PolicyRank) -> None:
        groups = linear_groups(shape, config.format, config.ignore)
        names = {name for group in groups for name in group}
        self._format = config.format
        self._params = {part.param for part in policy_slices(shape, rank) if part.name in names}

    def described(self) -> dict[str, str]:
        """For the header of a run."""
        return {"weights": f"rounded to {self._format} in {len(self._params)} matrices of this rank"}

    def attach(self, model: Any, chunk: int) -> None:
        """Have a stage's `chunk`-th run of layers compute with rounded weights."""
        for number, name in map(chunk_of, sorted(self._params)):
            if number == chunk:
                linear = model.get_submodule(name.removesuffix(".weight"))
                linear.register_forward_pre_hook(self._round)
                linear.register_forward_hook(_restore, always_call=True)

    def folded(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The parameters with rounded weights, computed when one is asked for."""
        return ComputedTensors(parameters, self._params, lambda name: fold(self._format, parameters[name]))

    def _round(self, linear: Any, inputs: object) -> None:
        # An attribute of the instance comes before the parameter of the same name, which stays registered.
        linear.__dict__["weight"] = _StraightThrough.apply(linear.weight, self._format)


def _restore(linear: Any, inputs: object, output: object) -> None:
    linear.__dict__.pop("weight", None)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, format: QuantizationFormat) -> Tensor:
        return fold(format, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
