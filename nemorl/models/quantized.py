"""Linear weights in the formats of quantized Hugging Face folders, as vLLM reads them.

| format | tensors of `X.weight` [N, K] | `quant_method` |
|---|---|---|
| int8 | `X.weight` int8 [N, K], `X.weight_scale` [N, 1] | compressed-tensors, int-quantized |
| fp8 | `X.weight` e4m3 [N, K], `X.weight_scale` [], `X.input_scale` [] | modelopt, FP8 |
| fp8_channel | `X.weight` e4m3 [N, K], `X.weight_scale` [N] | modelopt, FP8_PER_CHANNEL_PER_TOKEN |
| fp8_block | `X.weight` e4m3 [N, K], `X.weight_scale` [ceil(N/128), 1, K/128, 1] | modelopt, FP8_PB_WO |
| int4 | `X.weight_packed` int32 [N, K/8], `X.weight_scale` [N, K/128], `X.weight_shape` int64 [2] |
  compressed-tensors, pack-quantized |
| nvfp4 | `X.weight` uint8 [N, K/2], `X.weight_scale` e4m3 [N, K/16], `X.weight_scale_2` [],
  `X.input_scale` [] | modelopt, NVFP4 |
| nvfp4_w4a16 | as nvfp4, without `X.input_scale` | modelopt, W4A16_NVFP4 |

Scales without a type are float32; a weight is approximately its value times its scale. Values and scales are
those of modelopt's `export_hf_checkpoint`, which the tests compare bit by bit. The layout of int8 and int4 is
another, because vLLM does not read modelopt's.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from nemorl.config.quantization import STATIC_INPUTS, QuantizationFormat
from nemorl.errors import NemorlError

from .family import LayerKind, Split, Stage
from .layout import hf_tensors, weight_rules
from .shape import ModelShape

_INT8, _INT4, _E4M3, _E2M1 = 127, 7, 448, 6  # largest values that scales map to
_FP8_BLOCK, _INT4_GROUP, _NVFP4_GROUP = 128, 128, 16  # elements that share a scale along each axis
# Rows and columns of the blocks that have scales of their own; 1 where a scale is of rows or of the tensor.
BLOCKS: dict[QuantizationFormat, tuple[int, int]] = {
    "int8": (1, 1),
    "fp8": (1, 1),
    "fp8_channel": (1, 1),
    "fp8_block": (_FP8_BLOCK, _FP8_BLOCK),
    "int4": (1, _INT4_GROUP),
    "nvfp4": (1, _NVFP4_GROUP),
    "nvfp4_w4a16": (1, _NVFP4_GROUP),
}
# Of their values, and of the scales of groups.
BYTES_PER_WEIGHT: dict[QuantizationFormat, float] = {
    "int8": 1,
    "fp8": 1,
    "fp8_channel": 1,
    "fp8_block": 1,
    "int4": 1 / 2 + 4 / _INT4_GROUP,
    "nvfp4": 1 / 2 + 1 / _NVFP4_GROUP,
    "nvfp4_w4a16": 1 / 2 + 1 / _NVFP4_GROUP,
}
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of e2m1, by their code
_FLOAT4_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between two of them
_FLOAT4_ODD = (0.75, 1.75, 3.5)  # where halfway rounds up, to an even mantissa
_MODELOPT = {
    "fp8": "FP8",
    "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8_block": "FP8_PB_WO",
    "nvfp4": "NVFP4",
    "nvfp4_w4a16": "W4A16_NVFP4",
}


class Unquantizable(NemorlError, ValueError):
    """A model, or a selection of its layers, that a format does not support."""


# Names of weights that engines fuse into one matrix, such as those of queries, keys and values.
LinearGroup = tuple[str, ...]


def linear_groups(
    shape: ModelShape, format: QuantizationFormat, ignore: Sequence[str] = ()
) -> tuple[LinearGroup, ...]:
    """The weights that are quantized. `ignore` has patterns (fnmatch) of HF names without `.weight`.

    Raises Unquantizable for a scalar head, for experts that are one tensor, unless they are ignored, for a
    pattern that matches nothing or a part of a fused matrix, and for columns that the format's groups do not
    divide.
    """
    if shape.head == "scalar":
        raise Unquantizable("models with a scalar head are not quantized: use a language model")
    tensors = hf_tensors(shape)
    modules = [name.removesuffix(".weight") for name in tensors]
    for pattern in ignore:
        if not any(fnmatchcase(module, pattern) for module in modules):
            raise Unquantizable(f"ignore = {pattern!r}: no layer has such a name; correct or remove it")
    groups: list[LinearGroup] = []
    of_experts: dict[str, tuple[str, bool]] = {}  # by layer the first matrix, and if it is ignored
    for names in _linear_names(shape):
        ignored = [_is_ignored(name, ignore) for name in names]
        if any(ignored) and not all(ignored):
            kept = ", ".join(name for name, skip in zip(names, ignored, strict=True) if not skip)
            problem = f"engines fuse {', '.join(names)}"
            raise Unquantizable(f"ignore = {list(ignore)}: {problem}; ignore all of them, also {kept}")
        if (layer := experts_of(names[0])) is not None:
            first, skipped = of_experts.setdefault(layer, (names[0], ignored[0]))
            if skipped != ignored[0]:
                kept = f"{names[0] if skipped else first} is not ignored"
                problem = f"engines compute {layer} as a whole, and {kept}"
                raise Unquantizable(f"ignore = {list(ignore)}: {problem}; ignore {layer}.* or none of them")
        if all(ignored):
            continue
        if _fused_experts_of(names[0], tensors[names[0]]) is not None:
            problem = f"{names[0]} has all experts of a layer, which vLLM reads in no such format"
            raise Unquantizable(f"{problem}; add '*.experts.*' to ignore")
        columns, group = tensors[names[0]][1], BLOCKS[format][1]
        if columns % group:
            problem = f"{names[0]} has {columns} columns, and {format} requires a multiple of {group}"
            raise Unquantizable(f"{problem}; ignore such layers, or use another format")
        if format == "fp8_block" and len(names) > 1:
            for name in names[:-1]:  # a block of the fused matrix may not hold rows of two of them
                if (rows := tensors[name][0]) % _FP8_BLOCK:
                    problem = f"{name} has {rows} rows, and {format} requires a multiple of {_FP8_BLOCK}"
                    raise Unquantizable(f"{problem} where engines fuse matrices; use another format")
        groups.append(names)
    if not groups:
        raise Unquantizable(f"ignore = {list(ignore)}: no linear layer is left to quantize; remove a pattern")
    return tuple(groups)


def _is_ignored(name: str, ignore: Sequence[str]) -> bool:
    return any(fnmatchcase(name.removesuffix(".weight"), pattern) for pattern in ignore)


def experts_of(name: str) -> str | None:
    """The name of all experts of a layer, of a weight of one of them."""
    block, experts, rest = name.rpartition(".experts.")
    return f"{block}.experts" if experts and rest[0].isdigit() else None


def _fused_experts_of(name: str, size: tuple[int, ...]) -> str | None:
    """The name of all experts of a layer, of a tensor that has the weights of all of them."""
    return f"{name.rpartition('.experts.')[0]}.experts" if len(size) > 2 else None


def input_keys(shape: ModelShape, format: QuantizationFormat, ignore: Sequence[str] = ()) -> dict[str, str]:
    """By quantized weight a name of its input: equal for fused weights, and for all experts of a layer."""
    keys: dict[str, str] = {}
    for group in linear_groups(shape, format, ignore):
        experts, projection = experts_of(group[0]), group[0].rsplit(".", 2)[1]
        keys |= dict.fromkeys(group, f"{experts}.{projection}" if experts else group[0])
    return keys


def input_scale_names(
    shape: ModelShape, format: QuantizationFormat, ignore: Sequence[str] = ()
) -> dict[str, str]:
    """By quantized weight the name of its `input_scale`; empty for formats that store none."""
    if format not in STATIC_INPUTS:
        return {}
    groups = linear_groups(shape, format, ignore)
    return {name: _input_scale_name(name) for group in groups for name in group}


def _input_scale_name(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.input_scale"


def _linear_names(shape: ModelShape) -> Iterator[tuple[str, ...]]:
    """Matrices of all layers, without routers; those of one rule have the same input, and engines fuse them.

    Of latent attention engines fuse both projections down, which are two rules.
    """
    rules = [rule for rule in weight_rules(shape) if rule.stage is Stage.LAYERS]
    for layer in range(shape.num_layers):
        kinds = {LayerKind.ALL, LayerKind.MOE if shape.is_moe(layer) else LayerKind.DENSE}
        down: list[str] = []
        for rule in rules:
            sizes = [tensor.stored_shape(shape) for tensor in rule.tensors]
            is_matrix = len(sizes[0]) > 1 and not rule.param.endswith(".bias")  # a bias may be of all experts
            if rule.layers not in kinds or rule.split is Split.REPLICATED or not is_matrix:
                continue  # of another kind of layers, or a router, a norm or a bias
            fused = len(sizes[0]) > 2  # gate and up may then be parts of one tensor
            for expert in range(shape.moe.num_experts if rule.experts and shape.moe and not fused else 1):
                names = [tensor.name.format(layer=layer, expert=expert) for tensor in rule.tensors]
                names = list(dict.fromkeys(names))
                if names[0].endswith((".q_a_proj.weight", ".kv_a_proj_with_mqa.weight")):
                    down += names
                else:
                    yield tuple(names)
        if down:
            yield tuple(down)


def quantization_config(
    shape: ModelShape, format: QuantizationFormat, groups: Iterable[LinearGroup]
) -> dict[str, Any]:
    """The field `quantization_config` of config.json for folders in which `groups` are quantized."""
    quantized, tensors = {name for group in groups for name in group}, hf_tensors(shape)
    linear = [name for names in _linear_names(shape) for name in names if name not in quantized]
    routers = [name for name in tensors if name.endswith((".gate.weight", ".router.weight"))]
    # vLLM asks for the experts of a layer by their common name, or by the names of the first one; of experts
    # that are one tensor by names that no tensor has.
    blocks = dict.fromkeys(block for name in linear if (block := experts_of(name)) is not None)
    fused = dict.fromkeys(
        block for name in linear if (block := _fused_experts_of(name, tensors[name])) is not None
    )
    ignore = ["lm_head", *(name.removesuffix(".weight") for name in (*linear, *routers)), *blocks, *fused]
    if format in _MODELOPT:
        config = {"quant_method": "modelopt", "quant_algo": _MODELOPT[format], "ignore": ignore}
        return config | ({"group_size": _NVFP4_GROUP} if format.startswith("nvfp4") else {})
    scheme: dict[str, Any] = {"type": "int", "symmetric": True}
    weights: dict[str, Any]
    inputs: dict[str, Any] | None
    if format == "int8":
        weights = scheme | {"num_bits": 8, "strategy": "channel", "dynamic": False}
        inputs = scheme | {"num_bits": 8, "strategy": "token", "dynamic": True}
    else:
        weights = scheme | {"num_bits": 4, "strategy": "group", "group_size": _INT4_GROUP, "dynamic": False}
        inputs = None
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if format == "int8" else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [*ignore, *(rf"re:{re.escape(block)}\..*" for block in fused)],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }


@torch.no_grad()
def quantize(
    format: QuantizationFormat, name: str, weight: Tensor, amax: Tensor | None = None
) -> dict[str, Tensor]:
    """The tensors of one weight [N, K], by their HF names, without `input_scale`.

    `amax` has the largest magnitudes of what shares a scale, where the weight is a part of that: of each row
    [N, 1] in int8 and fp8_channel, of the tensor [] (or of each row's tensor [N, 1]) in fp8, and of all
    weights with the same `weight_scale_2` [] in NVFP4. Without it they are the weight's own.
    """
    module, (rows, columns) = name.removesuffix(".weight"), weight.shape
    scale_name = f"{module}.weight_scale"
    match format:
        case "int8":
            scale = _scale(weight.abs().amax(1, keepdim=True) if amax is None else amax, _INT8)
            values = (weight / scale).round().clamp(-_INT8 - 1, _INT8).to(torch.int8)
            return {name: values, scale_name: scale}
        case "fp8":
            scale = _scale(weight.abs().amax() if amax is None else amax, _E4M3)
            return {name: (weight / scale).to(torch.float8_e4m3fn), scale_name: scale}
        case "fp8_channel":
            scale = _scale(weight.abs().amax(1, keepdim=True) if amax is None else amax, _E4M3)
            return {name: (weight / scale).to(torch.float8_e4m3fn), scale_name: scale.squeeze(1)}
        case "fp8_block":
            blocks = _blocks(weight)
            scale = _scale(blocks.abs().amax((1, 3), keepdim=True), _E4M3)
            values = (blocks / scale).to(torch.float8_e4m3fn).view(-1, columns)[:rows]
            return {name: values.contiguous(), scale_name: scale}
        case "int4":
            groups = weight.reshape(rows, -1, _INT4_GROUP)
            scale = _scale(groups.abs().amax(2), _INT4)
            values = (groups / scale[..., None]).round().clamp(-_INT4 - 1, _INT4).to(torch.int32)
            return {
                f"{module}.weight_packed": _pack(values.view(rows, columns)),
                scale_name: scale,
                f"{module}.weight_shape": torch.tensor([rows, columns]),
            }
        case "nvfp4" | "nvfp4_w4a16":
            groups = weight.reshape(rows, -1, _NVFP4_GROUP)
            scale_2 = _scale(weight.abs().amax() if amax is None else amax, _E2M1 * _E4M3)
            scale = groups.abs().amax(2).float() / (_E2M1 * scale_2)
            scale = torch.where(scale == 0, 1.0, scale).clamp(2**-9, _E4M3).to(torch.float8_e4m3fn)
            values = _float4_codes(groups / (scale.float() * scale_2)[..., None]).view(rows, columns)
            packed = values[:, 0::2] | values[:, 1::2] << 4
            return {name: packed, scale_name: scale, f"{module}.weight_scale_2": scale_2}


@torch.no_grad()
def dequantize(format: QuantizationFormat, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight [N, K] that engines compute with, in float32, from the tensors that `quantize` returns."""
    module = name.removesuffix(".weight")
    scale = tensors[f"{module}.weight_scale"].float()
    match format:
        case "int8" | "fp8":
            return tensors[name].float() * scale
        case "fp8_channel":
            return tensors[name].float() * scale[:, None]
        case "fp8_block":
            rows, columns = tensors[name].shape
            return (_blocks(tensors[name].float()) * scale).view(-1, columns)[:rows]
        case "int4":
            rows, columns = tensors[f"{module}.weight_shape"].tolist()
            groups = _unpack(tensors[f"{module}.weight_packed"]).view(rows, -1, _INT4_GROUP)
            return (groups * scale[..., None]).view(rows, columns)
        case "nvfp4" | "nvfp4_w4a16":
            packed = tensors[name]
            codes = torch.stack((packed & 15, packed >> 4), -1).int()
            magnitudes = torch.tensor(_FLOAT4, device=packed.device)[codes & 7]
            values = torch.where(codes >= 8, -magnitudes, magnitudes).view(*scale.shape, _NVFP4_GROUP)
            return (values * (scale * tensors[f"{module}.weight_scale_2"])[..., None]).flatten(1)


@torch.no_grad()
def fold(format: QuantizationFormat, weight: Tensor, amax: Tensor | None = None) -> Tensor:
    """A weight [N, K] rounded to the format, in its own type; `amax` as in `quantize`."""
    return dequantize(format, "weight", quantize(format, "weight", weight, amax)).to(weight.dtype)


@torch.no_grad()
def fold_inputs(format: QuantizationFormat, inputs: Tensor, amax: Tensor) -> Tensor:
    """The inputs [n, K] of a linear layer as engines round them, in their own type.

    `amax`: of each token [n, 1] in int8 and fp8_channel, stored [] in fp8 and nvfp4; fp8_block has one for
    each run of 128 columns, of its own.
    """
    if not inputs.numel():  # an expert may get no tokens
        return inputs
    match format:
        case "int8" | "fp8_channel":
            return fold(format, inputs, amax)
        case "fp8":  # larger inputs than those measured become the largest value
            return fold(format, inputs.clamp(-amax, amax), amax)
        case "nvfp4":
            return fold(format, inputs, amax)
        case "fp8_block":
            runs = inputs.reshape(-1, _FP8_BLOCK)
            return fold("fp8_channel", runs).view(inputs.shape)
        case _:
            return inputs


def input_scale(format: QuantizationFormat, amax: Tensor) -> Tensor:
    """`X.input_scale` from the largest magnitude of the inputs of a linear layer, or of a fused one.

    Of any shape, for several layers at once.
    """
    return _scale(amax, _E4M3 if format == "fp8" else _E2M1 * _E4M3)


class Quantizer:
    """Quantizes the tensors of a model, in any order, one group of fused matrices at a time."""

    def __init__(
        self,
        shape: ModelShape,
        format: QuantizationFormat,
        ignore: Sequence[str] = (),
        input_amax: Mapping[str, Tensor] | None = None,
        *,
        receives_input_scales: bool = False,
    ) -> None:
        """`input_amax` [] of each quantized weight: for formats that store scales of activations.

        With `receives_input_scales` these scales are among the tensors instead. Raises Unquantizable, as
        `linear_groups` and where these are missing.
        """
        groups = linear_groups(shape, format, ignore)
        if format in STATIC_INPUTS and input_amax is None and not receives_input_scales:
            problem = f"{format} stores scales of activations, which this checkpoint does not have"
            raise Unquantizable(
                f"{problem}; train with policy.quantization.calibration, or use another format"
            )
        self.config = quantization_config(shape, format, groups)
        self.format, self._input_amax = format, input_amax
        self._groups = {name: group for group in groups for name in group}
        self._waiting: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors that are complete now: none until the last of a group that shares scales."""
        group = self._groups.get(name)
        if group is None:
            return {name: tensor}
        if not self.format.startswith("nvfp4"):
            return quantize(self.format, name, tensor) | self._input_scales((name,))
        self._waiting[name] = tensor
        if any(other not in self._waiting for other in group):
            return {}
        weights = {other: self._waiting.pop(other) for other in group}
        amax = torch.stack([weight.abs().amax() for weight in weights.values()]).amax()
        parts = [quantize(self.format, other, weight, amax) for other, weight in weights.items()]
        return {other: part for tensors in parts for other, part in tensors.items()} | self._input_scales(
            group
        )

    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The quantized tensors of a stream of HF tensors."""
        for name, tensor in tensors:
            yield from self.add(name, tensor).items()

    def _input_scales(self, names: Sequence[str]) -> dict[str, Tensor]:
        if self._input_amax is None or self.format not in STATIC_INPUTS:
            return {}
        amax = self._input_amax
        return {_input_scale_name(name): input_scale(self.format, amax[name]) for name in names}


def _scale(amax: Tensor, largest: int) -> Tensor:
    """The scale that maps `amax` to `largest`: 1 where all elements are 0, as modelopt has it."""
    amax = torch.where(amax == 0, largest, amax.float())
    return amax.clamp(min=torch.finfo(torch.float32).tiny) / largest


def _blocks(matrix: Tensor) -> Tensor:
    """A matrix as [rows of blocks, 128, columns of blocks, 128], its last rows padded by zeros."""
    padding = -matrix.shape[0] % _FP8_BLOCK
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, padding))
    return padded.view(-1, _FP8_BLOCK, matrix.shape[1] // _FP8_BLOCK, _FP8_BLOCK)


def _pack(values: Tensor) -> Tensor:
    """Eight 4-bit values of a row in an int32, the first in the lowest bits, each plus 8."""
    nibbles = (values + 8).view(values.shape[0], -1, 8)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
    return (nibbles << shifts).sum(2, dtype=torch.int32)


def _unpack(packed: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return ((packed[..., None] >> shifts & 15) - 8).flatten(1).float()


def _float4_codes(values: Tensor) -> Tensor:
    """Codes of e2m1 [uint8], the sign in bit 3, by rounding to the nearest and halfway to even."""
    magnitudes = values.abs()
    bounds = torch.tensor(_FLOAT4_BOUNDS, device=values.device)
    odd = torch.isin(magnitudes, torch.tensor(_FLOAT4_ODD, device=values.device))
    codes = torch.searchsorted(bounds, magnitudes.contiguous()) + odd
    return (codes + 8 * (values < 0)).to(torch.uint8)
