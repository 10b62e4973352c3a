"""Qwen2 and Qwen2.5, dense (arXiv 2407.10671): Llama with biases on queries, keys and values."""

from .family import Dim, HfTensor, ModelFamily, Split, WeightRule
from .hf_config import HfConfig, decoder_shape, refuse_windows
from .llama import LLAMA_WEIGHTS
from .shape import ModelShape

QKV_BIAS = WeightRule(
    "decoder.layers.{layer}.self_attention.linear_qkv.bias",
    (
        HfTensor("model.layers.{layer}.self_attn.q_proj.bias", (Dim.QUERY,)),
        HfTensor("model.layers.{layer}.self_attn.k_proj.bias", (Dim.KEY_VALUE,)),
        HfTensor("model.layers.{layer}.self_attn.v_proj.bias", (Dim.KEY_VALUE,)),
    ),
    Split.HEAD_GROUPS,
)


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", use_sliding_window=False)
    refuse_windows(config)
    return decoder_shape(config, "qwen2", qkv_bias=True)


QWEN2 = ModelFamily("qwen2", ("Qwen2ForCausalLM",), _read, lambda shape: (*LLAMA_WEIGHTS, QKV_BIAS))
