"""Modules of a model's layers: Megatron's, with our core attention and, in local layers, our norms.

One number after each token instead of the vocabulary: the head of a critic or a reward model.

Layers of Transformer Engine's linears and norms, as Megatron puts them together.

They hold the same tensors as Megatron's local layers, under names that `nemorl.models.megatron_names` reads.
The core attention, the norms behind attention and MLP and the routing stay ours: see `layers.py`, which
replaces them in either, and `kernels.py` for the reason.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemorl.models.shape import ModelShape

from .attention import PackedAttention
from .latent import LatentAttention
from .moe import ExpertLayer, RoutedLayer


def transformer_engine_layer(shape: ModelShape, layer: int) -> ModuleSpec:
    """One layer by its number in the whole model; only where Transformer Engine can be imported."""
    spec: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.moe.num_experts if shape.moe and shape.is_moe(layer) else None,
        moe_grouped_gemm=True,
        # Latent attention always has its norms, and the specification has to be asked for them.
        qk_layernorm=shape.qk_norm or shape.mla is not None,
        multi_latent_attention=shape.mla is not None,
    )
    if shape.mla is not None:
        attention = spec.submodules.self_attention.submodules
        # Megatron would copy these to all tensor-parallel ranks here and divide them in local layers.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = TEColumnParallelLinear
    return spec


class RMSNorm(torch.nn.Module):
    """Root mean square norm; unlike Megatron's wrapper of torch's it takes sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees its part of the tokens only; Megatron sums the gradients of weights that say so.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as `x` [..., hidden_size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """The same with a weight that is kept less one, as Gemma has it."""

    def forward(self, x: Tensor) -> Tensor:
        """The shape and type of `x` [..., hidden_size], computed in float32 as in transformers."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float() + 1, self.eps).type_as(x)


class NormedAdd(torch.nn.Module):
    """Megatron's step from a sublayer's output to the residual stream, with a norm of the output.

    Under sequence parallelism it sees the rank's own tokens, as the other norms do.
    """

    def __init__(self, norm: type[RMSNorm], config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """A function of (output, bias), the residual stream and the dropout, of which there is none."""
        return self._add

    def _add(self, output: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        normed: Tensor = self.norm(output[0])
        return residual + normed


def block_spec(
    config: TransformerConfig, shape: ModelShape, layers: Iterable[int]
) -> TransformerBlockSubmodules:
    """A run of layers, by their numbers in the whole model."""
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config, shape, layer) for layer in layers],
        layer_norm=TENorm if config.transformer_impl == "transformer_engine" else _norm(shape),
    )


def _layer_spec(config: TransformerConfig, shape: ModelShape, layer: int) -> ModuleSpec:
    if config.transformer_impl == "transformer_engine":
        spec = transformer_engine_layer(shape, layer)
    else:
        spec = _local_layer(shape)
    if shape.is_moe(layer):
        spec.module, spec.submodules.mlp = RoutedLayer, ExpertLayer
    spec.submodules.self_attention.submodules.core_attention = _core_attention(shape, layer)
    if shape.mla is not None:
        spec.submodules.self_attention.module = LatentAttention
    if shape.post_norms:
        add = ModuleSpec(NormedAdd, params={"norm": _norm(shape), "config": config})
        spec.submodules.self_attn_bda = spec.submodules.mlp_bda = add
    return spec


def _local_layer(shape: ModelShape) -> ModuleSpec:
    spec: ModuleSpec = get_gpt_layer_local_spec(
        qk_layernorm=shape.qk_norm, multi_latent_attention=shape.mla is not None, normalization="RMSNorm"
    )
    attention, norm = spec.submodules.self_attention.submodules, _norm(shape)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    if shape.mla is not None:
        attention.q_layernorm = attention.kv_layernorm = norm
    return spec


def _norm(shape: ModelShape) -> type[RMSNorm]:
    return ZeroCenteredRMSNorm if shape.zero_centered_norm else RMSNorm


def _core_attention(shape: ModelShape, layer: int) -> ModuleSpec:
    window = shape.window(layer)
    local_rope = window is not None and shape.local_rope is not None
    params = {"window": window, "local_rope": local_rope, "rotates": shape.mla is None, "sinks": shape.sinks}
    return ModuleSpec(PackedAttention, params=params)


class ScalarHead(torch.nn.Module):
    """A linear layer to one number, the same on all tensor-parallel ranks.

    Zero until weights are loaded, so that a fresh critic expects nothing of any state.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self._sequence_parallel = config.sequence_parallel
        # Then a rank multiplies it with its own tokens only, and Megatron sums the gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [n] float32, from hidden states [n, 1, H], of n / TP tokens under sequence parallelism."""
        values = F.linear(hidden, self.weight).float().flatten()
        if not self._sequence_parallel:
            return values
        # All ranks compute the same loss from the values, so each has the whole gradient of its own.
        return tensor_parallel.gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
            values, tensor_parallel_output_grad=False
        )
