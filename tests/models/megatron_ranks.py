"""Policy ranks without processes: the parameters that Megatron's local layer spec makes, on each rank."""

from torch import Tensor, full, nan

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout import PolicyRank, policy_rank
from nemorl.models.shape import MlaShape, ModelShape, MoeShape

Extents = dict[str, tuple[int, ...]]


def ranks(tp_size: int, pp_size: int, ep_size: int = 1) -> list[PolicyRank]:
    """All ranks; as many copies as it takes for the experts to be shared."""
    layout = LayoutConfig(
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        data_parallel_size=max(1, ep_size // tp_size),
        expert_parallel_size=ep_size,
    )
    return [policy_rank(layout, rank) for rank in range(layout.world_size)]


def empty_parameters(shape: ModelShape, rank: PolicyRank) -> dict[str, Tensor]:
    """Every parameter of one rank, full of NaN, of the shapes that Megatron documents."""
    hidden = shape.hidden_size
    tp_size, pp_size = rank.layout.tensor_parallel_size, rank.layout.pipeline_parallel_size
    vocabulary = (shape.vocab_size + tp_size - 1) // tp_size
    first, last = rank.pp_rank == 0, rank.pp_rank == pp_size - 1
    num_layers = shape.num_layers // pp_size
    shapes: Extents = {}
    if first:
        shapes["embedding.word_embeddings.weight"] = (vocabulary, hidden)
    for layer in range(num_layers):
        of_layer = {"input_layernorm.weight": (hidden,), "pre_mlp_layernorm.weight": (hidden,)}
        if shape.post_norms:
            of_layer |= {"self_attn_bda.norm.weight": (hidden,), "mlp_bda.norm.weight": (hidden,)}
        attention = _attention(shape, tp_size) if shape.mla is None else _latent(shape, shape.mla, tp_size)
        of_layer |= {f"self_attention.{name}": extents for name, extents in attention.items()}
        if shape.moe is None or not shape.is_moe(rank.pp_rank * num_layers + layer):
            mlp = _mlp(hidden, shape.ffn_hidden_size // tp_size)
        else:
            mlp = _experts(shape, shape.moe, rank)
        of_layer |= {f"mlp.{name}": extents for name, extents in mlp.items()}
        shapes |= {f"decoder.layers.{layer}.{name}": extents for name, extents in of_layer.items()}
    if last:
        shapes["decoder.final_layernorm.weight"] = (hidden,)
        if not shape.tied_embeddings or not first:
            shapes["output_layer.weight"] = (vocabulary, hidden)
    return {name: full(extents, nan) for name, extents in shapes.items()}


def _attention(shape: ModelShape, tp_size: int) -> Extents:
    heads = shape.num_attention_heads // tp_size
    rows = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim // tp_size
    shapes: Extents = {
        "linear_qkv.weight": (rows, shape.hidden_size),
        "linear_proj.weight": (shape.hidden_size, heads * shape.head_dim),
    }
    if shape.qkv_bias:
        shapes["linear_qkv.bias"] = (rows,)
    if shape.linear_bias:
        shapes["linear_proj.bias"] = (shape.hidden_size,)
    if shape.sinks:
        shapes["core_attention.softmax_offset"] = (heads,)
    if shape.qk_norm:
        shapes |= {"q_layernorm.weight": (shape.head_dim,), "k_layernorm.weight": (shape.head_dim,)}
    return shapes


def _latent(shape: ModelShape, mla: MlaShape, tp_size: int) -> Extents:
    """Multi-head latent attention; the local spec divides the projections down, too."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads // tp_size
    query = heads * (mla.head_dim + mla.rotary_dim)
    shapes: Extents = {
        "linear_kv_down_proj.weight": ((mla.key_value_rank + mla.rotary_dim) // tp_size, hidden),
        "kv_layernorm.weight": (mla.key_value_rank,),
        "linear_kv_up_proj.weight": (heads * (mla.head_dim + mla.value_dim), mla.key_value_rank),
        "linear_proj.weight": (hidden, heads * mla.value_dim),
    }
    if mla.query_rank is None:
        return shapes | {"linear_q_proj.weight": (query, hidden)}
    return shapes | {
        "linear_q_down_proj.weight": (mla.query_rank // tp_size, hidden),
        "q_layernorm.weight": (mla.query_rank,),
        "linear_q_up_proj.weight": (query, mla.query_rank),
    }


def _mlp(hidden: int, ffn: int, prefix: str = "", bias: bool = False) -> Extents:
    shapes: Extents = {f"{prefix}linear_fc1.weight": (2 * ffn, hidden)}
    shapes[f"{prefix}linear_fc2.weight"] = (hidden, ffn)
    if bias:
        shapes |= {f"{prefix}linear_fc1.bias": (2 * ffn,), f"{prefix}linear_fc2.bias": (hidden,)}
    return shapes


def _experts(shape: ModelShape, moe: MoeShape, rank: PolicyRank) -> Extents:
    layout, hidden = rank.layout, shape.hidden_size
    shapes: Extents = {"router.weight": (moe.num_experts, hidden)}
    if moe.expert_bias:
        shapes["router.expert_bias"] = (moe.num_experts,)
    if moe.router_bias:
        shapes["router.bias"] = (moe.num_experts,)
    ffn = moe.ffn_hidden_size // layout.expert_tensor_parallel_size
    for expert in range(moe.num_experts // layout.expert_parallel_size):
        shapes |= _mlp(hidden, ffn, f"experts.local_experts.{expert}.", shape.linear_bias)
    if moe.shared_ffn_hidden_size:
        ffn = moe.shared_ffn_hidden_size // layout.tensor_parallel_size
        shapes |= _mlp(hidden, ffn, "shared_experts.")
    return shapes
