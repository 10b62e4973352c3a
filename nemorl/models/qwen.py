"""Qwen3 with experts (arXiv 2505.09388): Qwen3's attention, and a softmax over the chosen experts.

Qwen2 and Qwen2.5, dense (arXiv 2407.10671): Llama with biases on queries, keys and values.

Qwen3, dense (arXiv 2505.09388): Llama with an RMSNorm on each query and key head.
"""

from .family import HfTensor, ModelFamily, Split, WeightRule
from .hf_config import HfConfig, decoder_shape, refuse_windows
from .llama import LLAMA_WEIGHTS
from .mixture import gated_experts, softmax_top_k
from .shape import Dim, ModelShape, MoeShape

QKV_BIAS = WeightRule(
    "decoder.layers.{layer}.self_attention.linear_qkv.bias",
    (
        HfTensor("model.layers.{layer}.self_attn.q_proj.bias", (Dim.QUERY,)),
        HfTensor("model.layers.{layer}.self_attn.k_proj.bias", (Dim.KEY_VALUE,)),
        HfTensor("model.layers.{layer}.self_attn.v_proj.bias", (Dim.KEY_VALUE,)),
    ),
    Split.HEAD_GROUPS,
)


def _read_qwen2(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", use_sliding_window=False)
    refuse_windows(config)
    return decoder_shape(config, "qwen2", qkv_bias=True)


QWEN2 = ModelFamily("qwen2", ("Qwen2ForCausalLM",), _read_qwen2, lambda shape: (*LLAMA_WEIGHTS, QKV_BIAS))


QK_NORMS = (
    WeightRule(
        "decoder.layers.{layer}.self_attention.q_layernorm.weight",
        (HfTensor("model.layers.{layer}.self_attn.q_norm.weight", (Dim.HEAD,)),),
        Split.REPLICATED,
    ),
    WeightRule(
        "decoder.layers.{layer}.self_attention.k_layernorm.weight",
        (HfTensor("model.layers.{layer}.self_attn.k_norm.weight", (Dim.HEAD,)),),
        Split.REPLICATED,
    ),
)


def _read_qwen3(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=False, use_sliding_window=False)
    refuse_windows(config)
    return decoder_shape(config, "qwen3", qk_norm=True, head_dim=config.get("head_dim", 128))


QWEN3 = ModelFamily("qwen3", ("Qwen3ForCausalLM",), _read_qwen3, lambda shape: (*LLAMA_WEIGHTS, *QK_NORMS))


_MLP = "model.layers.{layer}.mlp."
_EXPERT = _MLP + "experts.{expert}."
EXPERTS = gated_experts(
    router=_MLP + "gate.weight",
    gate=_EXPERT + "gate_proj.weight",
    up=_EXPERT + "up_proj.weight",
    down=_EXPERT + "down_proj.weight",
)


def _read_qwen3_moe(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=False, use_sliding_window=False, decoder_sparse_step=1)
    refuse_windows(config)
    dense = config.get("mlp_only_layers", [])
    if sorted(dense) != list(range(len(dense))):
        raise config.unsupported("mlp_only_layers", "only the first layers may be without experts")
    # The name on disk until transformers 4 and since 5.
    num_experts = config.integer("num_experts" if config.get("num_experts") else "num_local_experts")
    moe = MoeShape(
        num_experts=num_experts,
        top_k=softmax_top_k(config, num_experts),
        ffn_hidden_size=config.integer("moe_intermediate_size"),
        first_layer=len(dense),
        normalize=bool(config.get("norm_topk_prob", False)),
    )
    return decoder_shape(config, "qwen3_moe", qk_norm=True, head_dim=config.get("head_dim", 128), moe=moe)


QWEN3_MOE = ModelFamily(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    _read_qwen3_moe,
    lambda shape: (*LLAMA_WEIGHTS, *QK_NORMS, *EXPERTS),
)
