"""Training with linear layers that are rounded to a format: quantization-aware training.

    forward     y = fold(W) fold(x), or fold(W) x where activations stay as they are
    backward    dW = dy fold(x)^T, dx = fold(W)^T dy, as if rounding had the gradient 1 (straight-through,
                arXiv 1308.3432)

The optimizer and checkpoints have W. Adapters are added to fold(W) x, which is frozen (arXiv 2305.14314).

A scale may need more than a rank has of a matrix: that of a row whose columns are divided, or that of a
complete matrix. These magnitudes are measured once for each change of the weights, so that a forward pass and
a sender of weights need no other rank for them.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemorl.config.quantization import WEIGHT_ONLY, QuantizationConfig
from nemorl.models.layout import PolicyRank, chunk_of
from nemorl.models.quantized import fold, fold_inputs
from nemorl.models.quantized_parts import QuantizedParam, quantized_params
from nemorl.models.shape import ModelShape
from nemorl.models.tensors import ComputedTensors, local_view

from .calibration import InputRanges

_BY_ROW = ("int8", "fp8_channel")


class FakeQuantization:
    """Rounds the weights of one rank, and the inputs of its linear layers with `activations`."""

    def __init__(
        self,
        shape: ModelShape,
        config: QuantizationConfig,
        rank: PolicyRank,
        parameters: Callable[[], Mapping[str, Tensor]],
        ranges: InputRanges | None = None,
    ) -> None:
        """`parameters` of the rank; `ranges` of inputs, for formats that store scales of activations."""
        self._parameters = parameters
        self._format, self._config, self._ranges = config.format, config, ranges
        self._params = {param.name: param for param in quantized_params(shape, config, rank)}
        self._rounds_inputs = config.activations and config.format not in WEIGHT_ONLY
        self._amax: dict[str, Tensor] = {}  # of what several ranks share, by parameter
        self._of_reference: dict[str, Tensor] = {}
        self._enabled = True
        self._kept: dict[str, Tensor] | None = None  # rounded weights, while these do not change

    def described(self) -> dict[str, str]:
        """For the header of a run."""
        inputs = ", and their inputs" if self._rounds_inputs else ""
        kind = "as the policy's" if self._config.reference == "fake" else "not rounded"
        return {
            "weights": f"rounded to {self._format} in {len(self._params)} matrices of this rank{inputs}",
            "reference": f"weights {kind}",
        }

    def attach(self, model: Any, chunk: int) -> None:
        """Have a stage's `chunk`-th run of layers compute with rounded weights."""
        for param in self._params.values():
            number, name = chunk_of(param.name)
            if number == chunk:
                linear = model.get_submodule(name.removesuffix(".weight"))
                # Weak, or a worker that is gone would stay with its process groups: gc does not collect it.
                linear.register_forward_pre_hook(partial(_round_by, weakref.ref(self), param))
                linear.register_forward_hook(_restore, always_call=True)

    def measure(self, *, reference: bool = False) -> None:
        """Measure what several ranks share, after a change of the weights; all ranks of a stage call it.

        `reference`: these are also the weights of the reference.
        """
        self._amax, parameters = {}, self._parameters()
        for of_expert in (False, True):
            params = [param for param in self._params.values() if param.of_expert == of_expert]
            found = self._own_amax(params, parameters)
            group = _sharing(of_expert)
            if found and group.size() > 1:
                flat = torch.cat([one.flatten() for one in found.values()])
                dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
                sizes = [one.numel() for one in found.values()]
                split = zip(found, flat.split(sizes), strict=True)
                found = {key: values.view(found[key].shape) for key, values in split}
            for param in params:
                if (amax := self._of_param(param, found)) is not None:
                    self._amax[param.name] = amax
        if reference:
            self._of_reference = self._amax

    def folded(self) -> Mapping[str, Tensor]:
        """The parameters with rounded weights, computed when one is asked for."""
        parameters = self._parameters()
        return ComputedTensors(
            parameters, self._params, lambda name: self._fold(self._params[name], parameters[name])
        )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, weights do not change, and each is rounded once: for many passes over few tokens."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, nothing is rounded."""
        enabled, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = enabled

    @contextmanager
    def reference_in_place(self) -> Iterator[None]:
        """Inside, the weights are the reference's, which `reference` rounds or leaves as they are."""
        amax, enabled = self._amax, self._enabled
        self._amax, self._enabled = self._of_reference, self._config.reference == "fake"
        try:
            yield
        finally:
            self._amax, self._enabled = amax, enabled

    def _own_amax(self, params: list[QuantizedParam], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Magnitudes of this rank's part of what shares a scale, by parameter, weight or group of weights."""
        found: dict[str, Tensor] = {}
        for param in params:
            magnitudes = parameters[param.name].abs()
            if self._format in _BY_ROW and param.columns_are_divided:
                found[param.name] = magnitudes.amax(1, keepdim=True).float()
            elif self._format == "fp8":
                for name in param.group:  # of some this rank may have no rows
                    found.setdefault(name, magnitudes.new_zeros((), dtype=torch.float32))
                for part in param.parts:
                    largest = local_view({param.name: magnitudes}, part).amax().float()
                    found[part.name] = torch.maximum(found[part.name], largest)
            elif self._format.startswith("nvfp4"):
                largest, key = magnitudes.amax().float(), param.group[0]
                found[key] = torch.maximum(found[key], largest) if key in found else largest
        return found

    def _of_param(self, param: QuantizedParam, found: Mapping[str, Tensor]) -> Tensor | None:
        """`amax` of `fold` for a parameter; None if it follows from the parameter."""
        if self._format == "fp8":  # of the weight that each row belongs to
            return torch.cat([found[part.name].expand(part.size[0], 1) for part in param.parts])
        return found.get(param.group[0] if self._format.startswith("nvfp4") else param.name)

    def _fold(self, param: QuantizedParam, weight: Tensor) -> Tensor:
        if self._format != "fp8_block":
            return fold(self._format, weight, self._amax.get(param.name))
        folded = torch.empty_like(weight)
        for parts in param.runs():  # blocks are of adjacent rows of one weight
            rows = torch.cat([local_view({param.name: weight}, part) for part in parts])
            sizes = [part.size[0] for part in parts]
            for part, values in zip(parts, fold(self._format, rows).split(sizes), strict=True):
                local_view({param.name: folded}, part).copy_(values)
        return folded

    def _fold_inputs(self, param: QuantizedParam, inputs: Tensor) -> Tensor:
        """[..., K], of this rank's tokens and columns."""
        tokens = inputs.flatten(0, -2)
        if self._ranges is not None:
            return fold_inputs(self._format, tokens, self._ranges.of(param.name)).view(inputs.shape)
        amax = tokens.abs().amax(-1, keepdim=True).float()
        if self._format in _BY_ROW and param.columns_are_divided:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=_sharing(param.of_expert))
        return fold_inputs(self._format, tokens, amax).view(inputs.shape)

    def _round(self, param: QuantizedParam, linear: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self._enabled:
            return None
        # An attribute of the instance comes before the parameter of the same name, which stays registered.
        if self._kept is None:
            linear.__dict__["weight"] = _StraightThrough.apply(linear.weight, partial(self._fold, param))
        else:
            if param.name not in self._kept:
                self._kept[param.name] = self._fold(param, linear.weight.detach())
            linear.__dict__["weight"] = self._kept[param.name]
        if not self._rounds_inputs:
            return None
        return (_StraightThrough.apply(inputs[0], partial(self._fold_inputs, param)), *inputs[1:])


def _round_by(
    owner: "weakref.ref[FakeQuantization]", param: QuantizedParam, linear: Any, inputs: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    rounding = owner()
    assert rounding is not None, "the worker keeps it as long as its model"
    return rounding._round(param, linear, inputs)


def _restore(linear: Any, inputs: object, output: object) -> None:
    linear.__dict__.pop("weight", None)


def _sharing(of_expert: bool) -> dist.ProcessGroup:
    """The ranks that share the rows and columns of a matrix."""
    group: dist.ProcessGroup = (
        parallel_state.get_expert_tensor_parallel_group()
        if of_expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, fold: Callable[[Tensor], Tensor]) -> Tensor:
        return fold(values.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
