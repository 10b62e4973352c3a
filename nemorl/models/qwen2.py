"""Qwen2 and Qwen2.5, dense (arXiv 2407.10671): Llama with biases on queries, keys and values."""

from .family import Dim, HfTensor, ModelFamily, Split, WeightRule
from .llama import LLAMA

_QKV_BIAS = WeightRule(
    "decoder.layers.{layer}.self_attention.linear_qkv.bias",
    (
        HfTensor("model.layers.{layer}.self_attn.q_proj.bias", (Dim.QUERY,)),
        HfTensor("model.layers.{layer}.self_attn.k_proj.bias", (Dim.KEY_VALUE,)),
        HfTensor("model.layers.{layer}.self_attn.v_proj.bias", (Dim.KEY_VALUE,)),
    ),
    Split.HEAD_GROUPS,
)

QWEN2 = ModelFamily(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    qkv_bias=True,
    fixed_fields=(("use_sliding_window", False),),
    weights=(*LLAMA.weights, _QKV_BIAS),
)
