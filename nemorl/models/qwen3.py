"""Qwen3, dense (arXiv 2505.09388): Llama with an RMSNorm on each query and key head."""

from .family import Dim, HfTensor, ModelFamily, Split, WeightRule
from .llama import LLAMA

_QK_NORMS = (
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

QWEN3 = ModelFamily(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    qk_norm=True,
    default_head_dim=128,
    fixed_fields=(("attention_bias", False), ("use_sliding_window", False)),
    weights=(*LLAMA.weights, *_QK_NORMS),
)
