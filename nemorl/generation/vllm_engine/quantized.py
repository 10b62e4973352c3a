"""Weights on their way to vLLM's loader in the format of `policy.quantization`.

folder  weights ────────────────▶ quantized ─┬─▶ loader
                 placeholders of `input_scale` ┘        the engine then requires an update before it samples
update  weights ────────────────▶ quantized ─┬─▶ loader
        `input_scale` as the policy measured it ┘
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from nemorl.config.quantization import QuantizationConfig
from nemorl.models.layout import hf_tensors
from nemorl.models.quantized import (
    Quantizer,
    experts_of,
    input_scale_names,
    linear_groups,
    quantization_config,
)
from nemorl.models.shape import ModelShape


def config_of(shape: ModelShape, config: QuantizationConfig) -> dict[str, Any]:
    """The `quantization_config` that the engine is started with. Raises Unquantizable."""
    groups = linear_groups(shape, config.format, config.ignore)
    return quantization_config(shape, config.format, groups)


def update_tensors(
    shape: ModelShape, config: QuantizationConfig | None, dtype: str
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes and types of the tensors of an update: weights of `dtype`, `input_scale` [1] in float32."""
    shapes = hf_tensors(shape)
    types = dict.fromkeys(shapes, dtype)
    if config is None:
        return shapes, types
    names = input_scale_names(shape, config.format, config.ignore).values()
    return shapes | dict.fromkeys(names, (1,)), types | dict.fromkeys(names, "float32")


def of_folder(
    shape: ModelShape, config: QuantizationConfig, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """What vLLM loads of the model's folder, which has no ranges of inputs: their scales are 1."""
    names = input_scale_names(shape, config.format, config.ignore)
    quantizer = Quantizer(shape, config.format, config.ignore, dict.fromkeys(names, torch.zeros(())))
    return _without_repeated(shape, config, quantizer.stream(tensors))


def of_update(
    shape: ModelShape, config: QuantizationConfig, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """What vLLM loads of the tensors of an update, in any order: those of an export of the same policy."""
    names = set(input_scale_names(shape, config.format, config.ignore).values())
    quantizer = Quantizer(shape, config.format, config.ignore, receives_input_scales=True)
    received = ((name, values.view(()) if name in names else values) for name, values in tensors)
    return _without_repeated(shape, config, quantizer.stream(received))


def _without_repeated(
    shape: ModelShape, config: QuantizationConfig, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """In `fp8`, one `input_scale` of gate and up of an expert, which are equal.

    vLLM 0.32 has one place for both. A reload counts the elements that it loads: with two for one place it
    processes the layer before its last tensors have come, 35 of 36 in a layer of four experts.
    """
    repeated: set[str] = set()
    if config.format == "fp8":
        scales: Mapping[str, str] = input_scale_names(shape, config.format, config.ignore)
        groups = linear_groups(shape, config.format, config.ignore)
        repeated = {scales[name] for group in groups if experts_of(group[0]) for name in group[1:]}
    return ((name, values) for name, values in tensors if name not in repeated)
