"""Mistral (arXiv 2310.06825): Llama whose attention may see a sliding window of tokens only.

Mixtral (arXiv 2401.04088): Mistral with experts in every layer.
"""

from .family import ModelFamily
from .hf_config import HfConfig, decoder_shape
from .llama import ATTENTION, EMBEDDINGS, LLAMA_WEIGHTS
from .mixture import gated_experts, softmax_top_k
from .shape import ModelShape, MoeShape

_DEFAULT_WINDOW = 4096  # where config.json names none; null means that all tokens are seen


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=False, layer_types=None)
    window = config.fields.get("sliding_window", _DEFAULT_WINDOW)
    windows = () if window is None else (window,) * config.integer("num_hidden_layers")
    return decoder_shape(config, "mistral", windows=windows)


MISTRAL = ModelFamily("mistral", ("MistralForCausalLM",), _read, lambda shape: LLAMA_WEIGHTS)


_MLP = "model.layers.{layer}.block_sparse_moe."
_EXPERT = _MLP + "experts.{expert}."
EXPERTS = gated_experts(
    router=_MLP + "gate.weight",
    gate=_EXPERT + "w1.weight",
    up=_EXPERT + "w3.weight",
    down=_EXPERT + "w2.weight",
)


def _read_of_mixtral(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", router_jitter_noise=0.0)
    num_experts = config.integer("num_local_experts")
    moe = MoeShape(
        num_experts=num_experts,
        top_k=softmax_top_k(config, num_experts),
        ffn_hidden_size=config.integer("intermediate_size"),
    )
    window = config.get("sliding_window")
    windows = (window,) * config.integer("num_hidden_layers") if window else ()
    return decoder_shape(config, "mixtral", windows=windows, moe=moe)


MIXTRAL = ModelFamily(
    "mixtral", ("MixtralForCausalLM",), _read_of_mixtral, lambda shape: (*EMBEDDINGS, *ATTENTION, *EXPERTS)
)
