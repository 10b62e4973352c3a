"""Layers of Transformer Engine's linears and norms, as Megatron puts them together.

They hold the same tensors as Megatron's local layers, under names that `nemorl.models.megatron_names` reads.
The core attention, the norms behind attention and MLP and the routing stay ours: see `layers.py`, which
replaces them in either, and `kernels.py` for the reason.
"""

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec

from nemorl.models.shape import ModelShape

__all__ = ["TENorm", "transformer_engine_layer"]


def transformer_engine_layer(shape: ModelShape, layer: int) -> ModuleSpec:
    """One layer by its number in the whole model; only where Transformer Engine can be imported."""
    spec: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.moe.num_experts if shape.moe and shape.is_moe(layer) else None,
        moe_grouped_gemm=True,
        # Latent attention always has its norms, and the specification wants to be asked for them.
        qk_layernorm=shape.qk_norm or shape.mla is not None,
        multi_latent_attention=shape.mla is not None,
    )
    if shape.mla is not None:
        attention = spec.submodules.self_attention.submodules
        # Megatron would copy these to all tensor-parallel ranks here and divide them in local layers.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = TEColumnParallelLinear
    return spec
