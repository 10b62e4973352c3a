"""The engine's own parameters, and which boxes of the HF checkpoint they hold.

Query, key and value rows are fused into one matrix, gate and up rows into another: a decoding step is bound
by the number of matrix products and by the weights they stream. Names are `layers.{i}.qkv.weight` and so on;
a tied output head is no parameter of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice


@dataclass(frozen=True)
class Parameter:
    """One parameter and the HF tensors stacked in it along the first dimension, in order."""

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # (HF tensor, its shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows of all parts, then the dimensions that the parts share."""
        return (sum(shape[0] for _, shape in self.parts), *self.parts[0][1][1:])

    def slices(self) -> Iterator[TensorSlice]:
        """One slice per part: whole HF tensors, each a contiguous run of the parameter."""
        offset = 0
        for hf_name, shape in self.parts:
            strides = (shape[1], 1) if len(shape) == 2 else (1,)
            part = TensorSlice(hf_name, shape, (0,) * len(shape), shape, self.name, offset, strides)
            yield part
            offset += part.num_elements


def _layer_parameters(shape: ModelShape, layer: int) -> Iterator[Parameter]:
    hidden, ffn, head_dim = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    query = shape.num_attention_heads * head_dim
    key_value = shape.num_key_value_heads * head_dim
    own, hf = f"layers.{layer}", f"model.layers.{layer}"
    projections = (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value))

    yield Parameter(f"{own}.attention_norm.weight", ((f"{hf}.input_layernorm.weight", (hidden,)),))
    yield Parameter(
        f"{own}.qkv.weight",
        tuple((f"{hf}.self_attn.{name}.weight", (rows, hidden)) for name, rows in projections),
    )
    if shape.qkv_bias:
        yield Parameter(
            f"{own}.qkv.bias", tuple((f"{hf}.self_attn.{name}.bias", (rows,)) for name, rows in projections)
        )
    if shape.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Parameter(f"{own}.{name}.weight", ((f"{hf}.self_attn.{name}.weight", (head_dim,)),))
    yield Parameter(f"{own}.attention_output.weight", ((f"{hf}.self_attn.o_proj.weight", (hidden, query)),))
    yield Parameter(f"{own}.mlp_norm.weight", ((f"{hf}.post_attention_layernorm.weight", (hidden,)),))
    yield Parameter(
        f"{own}.gate_up.weight",
        tuple((f"{hf}.mlp.{name}.weight", (ffn, hidden)) for name in ("gate_proj", "up_proj")),
    )
    yield Parameter(f"{own}.down.weight", ((f"{hf}.mlp.down_proj.weight", (hidden, ffn)),))


def decoder_parameters(shape: ModelShape) -> list[Parameter]:
    """Every parameter of the decoder, in the order of the forward pass."""
    vocabulary = (shape.vocab_size, shape.hidden_size)
    parameters = [Parameter("embedding.weight", (("model.embed_tokens.weight", vocabulary),))]
    for layer in range(shape.num_layers):
        parameters.extend(_layer_parameters(shape, layer))
    parameters.append(Parameter("norm.weight", (("model.norm.weight", (shape.hidden_size,)),)))
    if not shape.tied_embeddings:
        parameters.append(Parameter("head.weight", (("lm_head.weight", vocabulary),)))
    return parameters
