"""Kernels of a policy, chosen from the requested and the installed ones. Imports no torch.

`USES` lists every use of a kernel library; `nemorl doctor` prints it. The attention is ours also between
Transformer Engine's linears, whose `DotProductAttention` needs Megatron to rotate queries and keys. Ours
computes the same for every family, window, sink and context-parallel layout.
"""

import importlib
import shutil
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemorl.config.policy import (
    AdamConfig,
    AutoRecompute,
    Fp8Config,
    NoRecompute,
    OptimizerConfig,
    RecomputeConfig,
    SelectiveRecompute,
)
from nemorl.models.layout_rules import norms_are_fused
from nemorl.models.shape import ModelShape

Device = Literal["cpu", "cuda"]
AttentionName = Literal["flash_attn", "torch_varlen", "torch_buckets"]
LayerKernels = Literal["local", "transformer_engine"]

_ADAM = AdamConfig()
TRANSFORMER_ENGINE = "transformer_engine"
APEX = "apex"
FLASH_ATTENTION = "flash_attn"
FUSED_WEIGHT_GRADIENT = "fused_weight_gradient_mlp_cuda"
TRITON = "triton"
# The part of a library that is used; what PyPI calls apex is another project, which has no optimizers.
_PARTS = {TRANSFORMER_ENGINE: ".pytorch", APEX: ".optimizers"}


@dataclass(frozen=True)
class Use:
    """One use of a kernel library by a policy."""

    what: str
    library: str  # as in `Installed`
    kernel: str
    chosen: str  # the function or the module of Megatron that decides
    fallback: str  # what computes the same without the library
    test: str  # of both giving the same, on a CPU with a stand-in for the library


_TE_TESTS, _APEX_TESTS = "tests/megatron/test_transformer_engine.py", "tests/megatron/test_apex.py"
USES = (
    Use(
        "attention",
        FLASH_ATTENTION,
        "flash_attn_varlen_func",
        "nemorl.megatron.kernels.choose",
        "torch's varlen_attn, also for shared prefixes; scaled_dot_product_attention for float32",
        "tests/megatron/test_attention.py::test_variable_length_kernels_compute_the_same",
    ),
    Use(
        "decoding in the embedded engine",
        FLASH_ATTENTION,
        "flash_attn_with_kvcache",
        "nemorl.models.kv_cache.decode_kernel",
        "scaled_dot_product_attention; always for float32",
        "tests/generation/torch_engine/test_flash_decoding.py::test_it_computes_what_torchs_attention_does",
    ),
    Use(
        "linear layers and norms",
        TRANSFORMER_ENGINE,
        "Linear, LayerNormLinear, RMSNorm",
        "nemorl.megatron.kernels.choose",
        "megatron-core's local layers, nemorl's RMSNorm",
        f"{_TE_TESTS}::test_both_kinds_of_layers_compute_and_learn_the_same",
    ),
    Use(
        "experts",
        TRANSFORMER_ENGINE,
        "GroupedLinear",
        "nemorl.megatron.moe.ExpertLayer",
        "megatron-core's experts in sequence",
        f"{_TE_TESTS}::test_both_kinds_of_layers_compute_and_learn_the_same",
    ),
    Use(
        "Adam",
        TRANSFORMER_ENGINE,
        "FusedAdam",
        "megatron.core.optimizer",
        "apex's FusedAdam, else torch's AdamW",
        f"{_TE_TESTS}::test_its_adam_learns_as_torchs",
    ),
    Use(
        "Adam with states of fewer bits",
        TRANSFORMER_ENGINE,
        "FusedAdam with exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype",
        "nemorl.megatron.kernels.check_optimizer",
        "none: the run is refused",
        f"{_TE_TESTS}::test_an_adam_of_fewer_bits_learns_and_continues",
    ),
    Use(
        "gradient norm",
        TRANSFORMER_ENGINE,
        "multi_tensor_l2norm",
        "megatron.core.optimizer.clip_grads",
        "apex's amp_C, else torch's norm",
        f"{_TE_TESTS}::test_its_adam_learns_as_torchs",
    ),
    Use(
        "Adam",
        APEX,
        "FusedAdam",
        "megatron.core.optimizer",
        "torch's AdamW",
        f"{_APEX_TESTS}::test_its_adam_learns_as_torchs",
    ),
    Use(
        "gradients of weights",
        FUSED_WEIGHT_GRADIENT,
        "wgrad_gemm_accum_fp32 and _fp16 (a part of apex)",
        "nemorl.megatron.kernels.choose",
        "a matrix product, then an addition",
        f"{_APEX_TESTS}::test_gradients_that_are_added_in_place_are_the_same",
    ),
    Use(
        "SwiGLU",
        TRITON,
        "a kernel that torch.compile makes of Megatron's bias_swiglu",
        "nemorl.megatron.kernels.choose",
        "torch's operations in sequence; always for other activations",
        "tests/megatron/test_kernels.py::test_the_fused_activation_computes_the_same",
    ),
)


@dataclass(frozen=True)
class Installed:
    """The kernel libraries that can be imported, by name, with versions (empty if unknown)."""

    versions: dict[str, str]
    compiler: bool = False  # with Python's headers, both of which Triton requires

    @classmethod
    def find(cls) -> "Installed":
        """The libraries of this process; one whose import fails counts as missing."""
        found = {}
        for name in (TRANSFORMER_ENGINE, APEX, FLASH_ATTENTION, FUSED_WEIGHT_GRADIENT, TRITON):
            # An import fails where it is missing, or built for another torch or a CUDA that is not here.
            with suppress(ImportError, OSError):
                importlib.import_module(name + _PARTS.get(name, ""))
                found[name] = str(getattr(importlib.import_module(name), "__version__", ""))
        headers = Path(sysconfig.get_path("include"), "Python.h").exists()
        return cls(found, compiler=headers and any(map(shutil.which, ("cc", "gcc", "clang"))))

    def __contains__(self, name: str) -> bool:
        return name in self.versions

    def described(self, name: str) -> str:
        return f"{name} {self.versions.get(name, 'not found')}".rstrip()


@dataclass(frozen=True)
class Kernels:
    attention: AttentionName = "torch_buckets"
    layers: LayerKernels = "local"
    fused_gradients: bool = False
    fused_activation: bool = False

    def described(
        self, installed: Installed, kind: Device, optimizer: OptimizerConfig = _ADAM
    ) -> dict[str, str]:
        """One line each for a run's header: what is used, and on a GPU what was looked for and not found."""
        flash = installed.described(FLASH_ATTENTION)
        return {
            "attention kernel": {
                "flash_attn": f"{flash} (flash_attn_varlen_func)",
                "torch_varlen": f"torch varlen_attn ({flash})",
                "torch_buckets": "torch scaled_dot_product_attention in buckets",
            }[self.attention],
            "layer kernels": installed.described(TRANSFORMER_ENGINE)
            if self.layers == "transformer_engine"
            else "megatron-core local" + _missing(TRANSFORMER_ENGINE, installed, kind),
            "activation kernel": _fused(self.fused_activation, TRITON, installed, kind),
            "optimizer kernel": optimizer_kernel(installed, kind, optimizer),
            "gradient accumulation": _fused(self.fused_gradients, FUSED_WEIGHT_GRADIENT, installed, kind),
        }


class KernelsNotFound(RuntimeError):
    """The config asks for kernels that are not here; the message says which and where."""


def choose(
    requested: Literal["auto", "local", "transformer_engine"],
    *,
    kind: Device,
    precision: str,
    activation: str,
    installed: Installed,
) -> Kernels:
    """The kernels of a policy; raises `KernelsNotFound` without the Transformer Engine that is requested."""
    if requested == "transformer_engine" and (kind == "cpu" or TRANSFORMER_ENGINE not in installed):
        why = "the package transformer_engine cannot be imported here"
        if kind == "cpu":
            why = "this process runs on the CPU, where it has no kernels"
        raise KernelsNotFound(f"policy.kernels is transformer_engine, but {why}: set it to auto")
    if kind == "cpu":
        return Kernels()
    attention: AttentionName = "flash_attn" if FLASH_ATTENTION in installed else "torch_varlen"
    return Kernels(
        attention="torch_buckets" if precision == "float32" else attention,  # no other kernel takes float32
        layers="transformer_engine" if requested != "local" and TRANSFORMER_ENGINE in installed else "local",
        fused_gradients=FUSED_WEIGHT_GRADIENT in installed,
        fused_activation=activation == "silu" and TRITON in installed and installed.compiler,
    )


def check_fp8(fp8: Fp8Config | None, kernels: Kernels) -> None:
    """Raise `KernelsNotFound` for FP8 without Transformer Engine's layers."""
    if fp8 is not None and kernels.layers == "local":
        raise KernelsNotFound(
            "policy.fp8 is given, which Transformer Engine's layers compute, but the package "
            "transformer_engine cannot be imported here: install it, or remove policy.fp8"
        )


def check_optimizer(optimizer: OptimizerConfig, installed: Installed) -> None:
    """Raise `KernelsNotFound` where `optimizer` names types that only an Adam takes that is not here."""
    if optimizer.narrow_fields and TRANSFORMER_ENGINE not in installed:
        fields = optimizer.narrow_fields
        named = ", ".join(f"policy.optimizer.{name} is {getattr(optimizer, name)}" for name in fields)
        raise KernelsNotFound(
            f"{named}, which Transformer Engine's Adam takes, but the package transformer_engine cannot be "
            "imported here: install it, or set float32"
        )


def optimizer_kernel(installed: Installed, kind: Device, optimizer: OptimizerConfig = _ADAM) -> str:
    """The Adam that Megatron takes: it looks for them in this order. On a CPU `device.py` says which."""
    if optimizer.kernel is not None:
        return optimizer.kernel
    if kind == "cpu":
        return "torch AdamW"
    for library in (TRANSFORMER_ENGINE, APEX):
        if library in installed:
            return f"FusedAdam of {installed.described(library)}"
    return "torch AdamW" + _missing(TRANSFORMER_ENGINE, installed, kind) + _missing(APEX, installed, kind)


def _fused(is_fused: bool, library: str, installed: Installed, kind: Device) -> str:
    if is_fused:
        return f"fused ({installed.described(library)})"
    return "not fused" + _missing(library, installed, kind)


def _missing(library: str, installed: Installed, kind: Device) -> str:
    """Nothing on a CPU, where these have no use."""
    return "" if kind == "cpu" or library in installed else f" ({installed.described(library)})"


def recompute_notes(shape: ModelShape, recompute: RecomputeConfig, layers: LayerKernels) -> dict[str, str]:
    """A line for a run's header: what is recomputed, and where a part of it has no effect."""
    if isinstance(recompute, NoRecompute | AutoRecompute):
        return {}
    asked = isinstance(recompute, SelectiveRecompute) and "layernorm" in recompute.modules
    fused = asked and layers == "transformer_engine" and norms_are_fused(shape)
    note = "; norms are not, Transformer Engine computes them with the matrices behind them" if fused else ""
    return {"recomputation": recompute.described + note}
