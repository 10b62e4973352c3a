"""What a model's layers are made of: Megatron's local modules with our norm and our core attention."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemorl.models.shape import ModelShape

from .attention import PackedAttention


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


def block_spec(
    config: TransformerConfig, shape: ModelShape, layers: Iterable[int]
) -> TransformerBlockSubmodules:
    """A run of layers, by their numbers in the whole model."""
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(shape, layer) for layer in layers], layer_norm=RMSNorm
    )


def _layer_spec(shape: ModelShape, layer: int) -> ModuleSpec:
    spec: ModuleSpec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = _core_attention(shape, layer)
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def _core_attention(shape: ModelShape, layer: int) -> ModuleSpec:
    window = shape.window(layer)
    local_rope = window is not None and shape.local_rope is not None
    return ModuleSpec(PackedAttention, params={"window": window, "local_rope": local_rope})
