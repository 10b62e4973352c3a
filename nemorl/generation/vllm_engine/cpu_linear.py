"""The kernels of vLLM's linear layers on a CPU.

They require a layout of their own, for which vLLM 0.32 drops the weights as they were loaded. Where updates
are written into these, layers are loaded unpacked, and `PackedLayers` gives them copies, which it makes again
after every update.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from .trace import storage_of

_choose_kernel = utils.dispatch_cpu_unquantized_gemm


def load_unpacked() -> None:
    """Have vLLM's loader keep the weights of linear layers as they are loaded."""
    utils.dispatch_cpu_unquantized_gemm = _leave_unpacked


def int8_kernels_for_float32() -> None:
    """Have vLLM multiply int8 with oneDNN in a model of float32, which its kernel for AMX refuses in 0.32."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    choose = cpu.check_cpu_sgl_kernel

    def check(n: int, k: int, dtype: torch.dtype) -> bool:
        # vLLM loads a model with its type as the default one.
        return torch.get_default_dtype() != torch.float32 and choose(n, k, dtype)

    cpu.check_cpu_sgl_kernel = check


class PackedLayers:
    """The linear layers of a loaded model that `load_unpacked` left unpacked; on a GPU there are none."""

    def __init__(self, model: nn.Module, *, eager: bool) -> None:
        """Pack them if the model is `eager`: compiled code would compute with the copies of its first run."""
        has_head = any(isinstance(module, ParallelLMHead) for module in model.modules())
        self._layers: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if eager
            and getattr(module, "cpu_linear", None) is _unpacked_linear
            and not (has_head and _is_table(module))  # else it is the head too
            and not current_platform.is_zen_cpu()  # AMD's kernels may compute with the weights themselves
        }
        self.pack()
        packed = {name: layer for name, layer in self._layers.items() if layer.cpu_linear.is_packed}
        in_use = {
            storage_of(parameter)
            for name, module in model.named_modules()
            if name not in packed or _is_table(module)
            for parameter in module.parameters(recurse=False)
        }
        # Names of the parameters that no computation reads.
        self.unread = frozenset(
            f"{name}.weight" for name, layer in packed.items() if storage_of(layer.weight) not in in_use
        )

    def pack(self) -> None:
        """Compute with copies of the weights as they are now."""
        for layer in self._layers.values():
            layer.cpu_linear = _PackedLinear(layer)


class _PackedLinear:
    """What vLLM calls as `layer.cpu_linear`."""

    def __init__(self, layer: Any) -> None:
        bias = getattr(layer, "bias", None)
        if bias is not None:  # the kernel for small matrices changes its type
            bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        self._layer: Any = SimpleNamespace(weight=layer.weight.detach(), bias=bias)
        _choose_kernel(self._layer, remove_weight=True)
        self.is_packed = self._layer.weight.numel() == 0

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = self._layer.cpu_linear(x, weight, None if bias is None else self._layer.bias)
        return out


def embeddings_of(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of embedding and head."""
    modules = (
        (n, module) for n, module in model.named_modules() if isinstance(module, VocabParallelEmbedding)
    )
    return frozenset(f"{name}.{own}" for name, module in modules for own, _ in module.named_parameters())


def _is_table(module: nn.Module) -> bool:
    """True for embeddings, which are looked up."""
    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


def _leave_unpacked(layer: Any, remove_weight: bool) -> None:
    if layer.weight.is_meta or layer.weight.ndim != 2:
        _choose_kernel(layer, remove_weight)
    else:
        layer.cpu_linear = _unpacked_linear


def _unpacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)
