"""Qwen2, Qwen2.5 and Qwen3, dense, and Qwen3 with experts (arXiv 2407.10671, 2505.09388); MiMo.

Llama with biases on queries, keys and values (Qwen2), or with an RMSNorm on each query and key head (Qwen3).
MiMo (arXiv 2505.07608) is Qwen2 with a layer for a further token.
"""

from dataclasses import replace

from .family import ModelFamily, WeightRule, mtp_rules
from .hf_config import HfConfig, decoder_shape, layer_types
from .llama import LLAMA_WEIGHTS, norm, qkv
from .mixtral import gated_experts, softmax_moe
from .shape import Dim, ModelShape, MtpShape

QKV_BIAS = qkv("bias")
QK_NORMS = (
    norm("self_attention.q_layernorm", "self_attn.q_norm", Dim.HEAD),
    norm("self_attention.k_layernorm", "self_attn.k_norm", Dim.HEAD),
)
_QWEN2_WEIGHTS = (*LLAMA_WEIGHTS, QKV_BIAS)
_QWEN3_WEIGHTS = (*LLAMA_WEIGHTS, *QK_NORMS)
_MOE_WEIGHTS = (*_QWEN3_WEIGHTS, *gated_experts("mlp"))
_MIMO_MTP = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "final_layernorm": "final_layernorm",
}


def _read_qwen2(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", use_sliding_window=False)
    layer_types(config, "full_attention")
    return decoder_shape(config, "qwen2", qkv_bias=True)


def _read_mimo(config: HfConfig) -> ModelShape:
    # As vLLM computes the layer from which it drafts (mimo.py, mimo_mtp.py).
    layers = config.get("num_nextn_predict_layers", 0)
    mtp = MtpShape(layers, hidden_first=True, before_final_norm=True) if layers else None
    return replace(_read_qwen2(config), family="mimo", mtp=mtp)


def _mimo_weights(shape: ModelShape) -> tuple[WeightRule, ...]:
    layers = mtp_rules(_QWEN2_WEIGHTS, _MIMO_MTP, "model.mtp_layers.{mtp}.") if shape.mtp else ()
    return (*_QWEN2_WEIGHTS, *layers)


def _read_qwen3(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=False, use_sliding_window=False)
    layer_types(config, "full_attention")
    return decoder_shape(config, "qwen3", qk_norm=True, head_dim=config.get("head_dim", 128))


def _read_qwen3_moe(config: HfConfig) -> ModelShape:
    config.require(decoder_sparse_step=1)
    dense = config.get("mlp_only_layers", [])
    if sorted(dense) != list(range(len(dense))):
        raise config.unsupported("mlp_only_layers", "only the first layers may be without experts")
    # the name on disk until transformers 4 and since 5
    experts = "num_experts" if config.get("num_experts") else "num_local_experts"
    changes = {"first_layer": len(dense), "normalize": bool(config.get("norm_topk_prob", False))}
    moe = softmax_moe(config, experts=experts, ffn="moe_intermediate_size", **changes)
    return replace(_read_qwen3(config), family="qwen3_moe", moe=moe)


QWEN2 = ModelFamily("qwen2", ("Qwen2ForCausalLM",), _read_qwen2, lambda shape: _QWEN2_WEIGHTS)
MIMO = ModelFamily("mimo", ("MiMoForCausalLM",), _read_mimo, _mimo_weights, drafts_by_heads=False)
QWEN3 = ModelFamily("qwen3", ("Qwen3ForCausalLM",), _read_qwen3, lambda shape: _QWEN3_WEIGHTS)
QWEN3_MOE = ModelFamily("qwen3_moe", ("Qwen3MoeForCausalLM",), _read_qwen3_moe, lambda shape: _MOE_WEIGHTS)
