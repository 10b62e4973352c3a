"""Llama 2 and 3 and models like them (arXiv 2302.13971, 2407.21783); most families share these rules."""

from .family import HfTensor, LayerKind, ModelFamily, Split, Stage, WeightRule, layer_rule, layer_tensor
from .hf_config import HfConfig, decoder_shape, layer_types
from .shape import Dim, ModelShape

_EMBEDDING = HfTensor("model.embed_tokens.weight", (Dim.VOCABULARY, Dim.HIDDEN))
_FINAL_NORM = HfTensor("model.norm.weight", (Dim.HIDDEN,))
_HEAD = HfTensor("lm_head.weight", (Dim.VOCABULARY, Dim.HIDDEN))
EMBEDDINGS = (
    WeightRule("embedding.word_embeddings.weight", (_EMBEDDING,), Split.VOCABULARY, Stage.FIRST),
    WeightRule("decoder.final_layernorm.weight", (_FINAL_NORM,), Split.REPLICATED, Stage.LAST),
    WeightRule("output_layer.weight", (_HEAD,), Split.VOCABULARY, Stage.LAST),
)


def norm(param: str, tensor: str, extent: Dim = Dim.HIDDEN) -> WeightRule:
    return layer_rule(f"{param}.weight", Split.REPLICATED, layer_tensor(f"{tensor}.weight", extent))


def qkv(kind: str, *columns: Dim) -> WeightRule:
    """The rule of all weights or biases (`kind`) of queries, keys and values."""
    rows = {"q": Dim.QUERY, "k": Dim.KEY_VALUE, "v": Dim.KEY_VALUE}
    tensors = (layer_tensor(f"self_attn.{name}_proj.{kind}", dim, *columns) for name, dim in rows.items())
    return layer_rule(f"self_attention.linear_qkv.{kind}", Split.HEAD_GROUPS, *tensors)


INPUT_NORM = norm("input_layernorm", "input_layernorm")
QKV = qkv("weight", Dim.HIDDEN)
_OUTPUT = layer_tensor("self_attn.o_proj.weight", Dim.HIDDEN, Dim.QUERY)
ATTENTION_OUTPUT = layer_rule("self_attention.linear_proj.weight", Split.COLUMNS, _OUTPUT)
MLP_NORM = norm("pre_mlp_layernorm", "post_attention_layernorm")
ATTENTION = (INPUT_NORM, QKV, ATTENTION_OUTPUT, MLP_NORM)


def gated_mlp(block: str, ffn: Dim, layers: LayerKind) -> tuple[WeightRule, ...]:
    """Rules of a gated MLP that has the same name in the checkpoint and in Megatron."""
    gate, up = (layer_tensor(f"{block}.{name}_proj.weight", ffn, Dim.HIDDEN) for name in ("gate", "up"))
    down = layer_tensor(f"{block}.down_proj.weight", Dim.HIDDEN, ffn)
    return (
        layer_rule(f"{block}.linear_fc1.weight", Split.ROWS, gate, up, layers=layers),
        layer_rule(f"{block}.linear_fc2.weight", Split.COLUMNS, down, layers=layers),
    )


MLP = gated_mlp("mlp", Dim.FFN, LayerKind.DENSE)
LLAMA_WEIGHTS = (*EMBEDDINGS, *ATTENTION, *MLP)


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=False, mlp_bias=False)
    layer_types(config, "full_attention")
    return decoder_shape(config, "llama")


LLAMA = ModelFamily("llama", ("LlamaForCausalLM",), _read, lambda shape: LLAMA_WEIGHTS)
