"""Gemma 3, text (arXiv 2503.19786): norms around attention and MLP, five layers with a window to one without.

The models of 4 B parameters and more come with an image encoder and are not read.
"""

from typing import Any

from .family import ModelFamily
from .hf_config import HfConfig, decoder_shape, layer_windows
from .llama import ATTENTION_OUTPUT, EMBEDDINGS, INPUT_NORM, MLP, QKV, norm
from .qwen import QK_NORMS
from .shape import ModelShape, Rope

_WEIGHTS = (
    *EMBEDDINGS,
    INPUT_NORM,
    QKV,
    *QK_NORMS,
    ATTENTION_OUTPUT,
    norm("self_attn_bda.norm", "post_attention_layernorm"),
    norm("pre_mlp_layernorm", "pre_feedforward_layernorm"),
    *MLP,
    norm("mlp_bda.norm", "post_feedforward_layernorm"),
)


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_activation="gelu_pytorch_tanh", attention_bias=False)
    config.require(attn_logit_softcapping=None, final_logit_softcapping=None)
    if config.get("use_bidirectional_attention", False):
        raise config.unsupported("use_bidirectional_attention", "a policy looks at earlier tokens only")
    parameters: dict[str, Any] = config.get("rope_parameters", {})
    if "full_attention" in parameters:  # since transformers 5
        rope = config.rope_from("rope_parameters.full_attention", parameters["full_attention"])
        local_rope = config.rope_from("rope_parameters.sliding_attention", parameters["sliding_attention"])
    else:
        scaled = {"rope_theta": config.get("rope_theta", 1e6), **config.get("rope_scaling", {})}
        rope = config.rope_from("rope_scaling", scaled)
        local_rope = Rope(float(config.get("rope_local_base_freq", 1e4)))
    return decoder_shape(
        config,
        "gemma3",
        head_dim=config.get("head_dim", 256),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        rope=rope,
        local_rope=local_rope,
        windows=layer_windows(config, config.get("sliding_window_pattern", 6)),
        qk_norm=True,
        activation="gelu_tanh",
        softmax_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        zero_centered_norm=True,
        post_norms=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
    )


_CLASSIFIER = "Gemma3TextForSequenceClassification"
GEMMA3 = ModelFamily(
    *("gemma3", ("Gemma3ForCausalLM",), _read, lambda shape: _WEIGHTS, _CLASSIFIER), drafts_by_heads=False
)
