"""Qwen3, dense (arXiv 2505.09388): Llama with an RMSNorm on each query and key head."""

from .family import Dim, HfTensor, ModelFamily, Split, WeightRule
from .hf_config import HfConfig, decoder_shape, refuse_windows
from .llama import LLAMA_WEIGHTS
from .shape import ModelShape

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


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=False, use_sliding_window=False)
    refuse_windows(config)
    return decoder_shape(config, "qwen3", qk_norm=True, head_dim=config.get("head_dim", 128))


QWEN3 = ModelFamily("qwen3", ("Qwen3ForCausalLM",), _read, lambda shape: (*LLAMA_WEIGHTS, *QK_NORMS))
