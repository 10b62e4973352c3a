"""Policy ranks without processes: the parameters that Megatron's local layer spec makes, on each rank."""

from torch import Tensor, full, nan

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout import PolicyRank, policy_rank
from nemorl.models.shape import ModelShape


def ranks(tp_size: int, pp_size: int) -> list[PolicyRank]:
    layout = LayoutConfig(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)
    return [policy_rank(layout, rank) for rank in range(layout.world_size)]


def empty_parameters(shape: ModelShape, rank: PolicyRank) -> dict[str, Tensor]:
    """Every parameter of one rank, full of NaN, of the shapes that Megatron documents."""
    hidden, head = shape.hidden_size, shape.head_dim
    tp_size, pp_size = rank.layout.tensor_parallel_size, rank.layout.pipeline_parallel_size
    heads, kv_heads = shape.num_attention_heads // tp_size, shape.num_key_value_heads // tp_size
    ffn = shape.ffn_hidden_size // tp_size
    vocabulary = (shape.vocab_size + tp_size - 1) // tp_size
    first, last = rank.pp_rank == 0, rank.pp_rank == pp_size - 1
    shapes: dict[str, tuple[int, ...]] = {}
    if first:
        shapes["embedding.word_embeddings.weight"] = (vocabulary, hidden)
    for layer in range(shape.num_layers // pp_size):
        prefix = f"decoder.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attention.linear_qkv.weight"] = ((heads + 2 * kv_heads) * head, hidden)
        if shape.qkv_bias:
            shapes[prefix + "self_attention.linear_qkv.bias"] = ((heads + 2 * kv_heads) * head,)
        if shape.qk_norm:
            shapes[prefix + "self_attention.q_layernorm.weight"] = (head,)
            shapes[prefix + "self_attention.k_layernorm.weight"] = (head,)
        shapes[prefix + "self_attention.linear_proj.weight"] = (hidden, heads * head)
        shapes[prefix + "pre_mlp_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.linear_fc1.weight"] = (2 * ffn, hidden)
        shapes[prefix + "mlp.linear_fc2.weight"] = (hidden, ffn)
    if last:
        shapes["decoder.final_layernorm.weight"] = (hidden,)
        if not shape.tied_embeddings or not first:
            shapes["output_layer.weight"] = (vocabulary, hidden)
    return {name: full(extents, nan) for name, extents in shapes.items()}
