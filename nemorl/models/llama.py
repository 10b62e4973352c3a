"""Llama 2 and 3, and models of that architecture such as SmolLM2 (arXiv 2302.13971, 2407.21783)."""

from .family import HfTensor, LayerKind, ModelFamily, Split, Stage, WeightRule
from .hf_config import HfConfig, decoder_shape, refuse_windows
from .shape import Dim, ModelShape

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."

# Rules that most families share, under the names that most checkpoints use.
EMBEDDINGS = (
    WeightRule(
        "embedding.word_embeddings.weight",
        (HfTensor("model.embed_tokens.weight", (Dim.VOCABULARY, Dim.HIDDEN)),),
        Split.VOCABULARY,
        Stage.FIRST,
    ),
    WeightRule(
        "decoder.final_layernorm.weight",
        (HfTensor("model.norm.weight", (Dim.HIDDEN,)),),
        Split.REPLICATED,
        Stage.LAST,
    ),
    WeightRule(
        "output_layer.weight",
        (HfTensor("lm_head.weight", (Dim.VOCABULARY, Dim.HIDDEN)),),
        Split.VOCABULARY,
        Stage.LAST,
    ),
)
INPUT_NORM = WeightRule(
    _MEGATRON + "input_layernorm.weight",
    (HfTensor(_HF + "input_layernorm.weight", (Dim.HIDDEN,)),),
    Split.REPLICATED,
)
QKV = WeightRule(
    _MEGATRON + "self_attention.linear_qkv.weight",
    (
        HfTensor(_HF + "self_attn.q_proj.weight", (Dim.QUERY, Dim.HIDDEN)),
        HfTensor(_HF + "self_attn.k_proj.weight", (Dim.KEY_VALUE, Dim.HIDDEN)),
        HfTensor(_HF + "self_attn.v_proj.weight", (Dim.KEY_VALUE, Dim.HIDDEN)),
    ),
    Split.HEAD_GROUPS,
)
ATTENTION_OUTPUT = WeightRule(
    _MEGATRON + "self_attention.linear_proj.weight",
    (HfTensor(_HF + "self_attn.o_proj.weight", (Dim.HIDDEN, Dim.QUERY)),),
    Split.COLUMNS,
)
MLP_NORM = WeightRule(
    _MEGATRON + "pre_mlp_layernorm.weight",
    (HfTensor(_HF + "post_attention_layernorm.weight", (Dim.HIDDEN,)),),
    Split.REPLICATED,
)
ATTENTION = (INPUT_NORM, QKV, ATTENTION_OUTPUT, MLP_NORM)
MLP = (
    WeightRule(
        _MEGATRON + "mlp.linear_fc1.weight",
        (
            HfTensor(_HF + "mlp.gate_proj.weight", (Dim.FFN, Dim.HIDDEN)),
            HfTensor(_HF + "mlp.up_proj.weight", (Dim.FFN, Dim.HIDDEN)),
        ),
        Split.ROWS,
        layers=LayerKind.DENSE,
    ),
    WeightRule(
        _MEGATRON + "mlp.linear_fc2.weight",
        (HfTensor(_HF + "mlp.down_proj.weight", (Dim.HIDDEN, Dim.FFN)),),
        Split.COLUMNS,
        layers=LayerKind.DENSE,
    ),
)

LLAMA_WEIGHTS = (*EMBEDDINGS, *ATTENTION, *MLP)


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=False, mlp_bias=False)
    refuse_windows(config)
    return decoder_shape(config, "llama")


LLAMA = ModelFamily("llama", ("LlamaForCausalLM",), _read, lambda shape: LLAMA_WEIGHTS)
