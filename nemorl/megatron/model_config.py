"""What Megatron is told about a model: its own configuration, from the model's shape and the policy's."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from nemorl.config.policy import PolicyConfig
from nemorl.models.shape import ModelShape

from .device import DTYPES, DeviceKind
from .experts import expert_arguments
from .kernels import Kernels
from .pipeline import pipeline_arguments, recompute_arguments


def transformer_config(
    shape: ModelShape, policy: PolicyConfig, kind: DeviceKind, kernels: Kernels
) -> TransformerConfig:
    """Megatron's configuration of a model, laid out and run as `policy` says."""
    layout, dtype = policy.layout, DTYPES[policy.precision]
    return (TransformerConfig if shape.mla is None else MLATransformerConfig)(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.rms_norm_eps,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        softmax_scale=shape.softmax_scale,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=shape.zero_centered_norm,
        gated_linear_unit=True,
        add_bias_linear=shape.linear_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        **pipeline_arguments(layout, kind),
        **recompute_arguments(policy.recompute),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches differ in length, and losses are sums: see schedule.py.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # wanted by variable_seq_lengths, dense models included
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_sums,
        use_cpu_initialization=kind == "cpu",
        cuda_graph_scope=[],
        # Weights are always loaded.
        perform_initialization=False,
        transformer_impl=kernels.layers,
        moe_grouped_gemm=kernels.layers == "transformer_engine",
        gradient_accumulation_fusion=kernels.fused_gradients,
        bias_activation_fusion=kernels.fused_activation,
        # Rotation and softmax are our attention's, and without dropout and bias there is nothing to fuse.
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **_latent_attention(shape),
        **_activation(shape),
        **expert_arguments(shape, policy),
    )


def _latent_attention(shape: ModelShape) -> dict[str, Any]:
    """Fields of `MLATransformerConfig`; positions and the softmax scale are ours (latent.py)."""
    mla = shape.mla
    if mla is None:
        return {}
    return {
        "q_lora_rank": mla.query_rank,
        "kv_lora_rank": mla.key_value_rank,
        "qk_head_dim": mla.head_dim,
        "qk_pos_emb_head_dim": mla.rotary_dim,
        "v_head_dim": mla.value_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }


def _activation(shape: ModelShape) -> dict[str, Any]:
    """Megatron's fields for `activation(gate) * up` of an MLP or an expert."""
    match shape.activation:
        case "silu":
            return {"activation_func": F.silu}
        case "gelu_tanh":
            return {"activation_func": partial(F.gelu, approximate="tanh")}
        case "clamped_swiglu":
            # gate * sigmoid(1.702 gate) * (up + 1), both clamped first
            return {
                "activation_func": quick_gelu,
                "activation_func_clamp_value": 7.0,
                "glu_linear_offset": 1.0,
            }


def finalize_sums(models: list[Any], num_tokens: Tensor | None, **groups: Any) -> None:
    """Megatron's reduction of gradients over DP, SP and tied embeddings, not divided by a token count."""
    finalize_model_grads(models, None, **groups)
