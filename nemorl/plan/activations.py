"""How much a policy rank keeps for the backward pass: an estimate from the widths of the layers.

Counted are the inputs of matrix products and what attention, activation functions and norms keep. What is
small beside these (angles, masks, routing) is left out.
"""

from nemorl.config.policy import FullRecompute, LayoutConfig, PolicyConfig, SelectiveRecompute
from nemorl.models.layout import stage_layers
from nemorl.models.shape import ModelShape, MoeShape


def kept_elements(
    shape: ModelShape, policy: PolicyConfig, stage: int, tokens: int, num_micro_batches: int
) -> int:
    """Elements that a rank of a pipeline stage keeps at most, of micro-batches of `tokens` of its own tokens.

    A stage of P has P less its number micro-batches in flight, and interleaved ones more, of a part of their
    layers each (arXiv 2104.04473).
    """
    layout = policy.layout
    stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_parallel_size
    behind = stages - 1 - stage
    in_flight = behind + 1 if chunks == 1 else 2 * behind + (chunks - 1) * stages + 1
    in_flight = min(in_flight, num_micro_batches * chunks)
    widths = {with_experts: _layer(shape, policy, with_experts) for with_experts in (False, True)}
    runs = [
        [widths[shape.is_moe(layer)] for layer in stage_layers(shape.num_layers, layout, stage, chunk)]
        for chunk in range(chunks)
    ]
    kept = max(_run(shape, policy, run) for run in runs)
    again = max(_computed_again(policy, run) for run in runs)
    return tokens * (in_flight * kept + again)


def _run(shape: ModelShape, policy: PolicyConfig, layers: list[int]) -> int:
    """Kept for a token by a run of layers that keep so much each where nothing is computed again."""
    recompute = policy.recompute
    if not isinstance(recompute, FullRecompute):
        return sum(layers)
    inputs = _hidden(shape, policy.layout)
    if recompute.method == "uniform":
        return inputs * -(-len(layers) // recompute.num_layers)
    rest = layers[recompute.num_layers :]
    return inputs * (len(layers) - len(rest)) + sum(rest)


def _computed_again(policy: PolicyConfig, layers: list[int]) -> int:
    """Kept for a token while what was not kept is computed again."""
    recompute = policy.recompute
    if not isinstance(recompute, FullRecompute):
        return 0
    together = recompute.num_layers if recompute.method == "uniform" else 1
    return max(layers) * together


def _layer(shape: ModelShape, policy: PolicyConfig, with_experts: bool) -> int:
    """Kept for a token by one layer."""
    layout = policy.layout
    left_out = policy.recompute.modules if isinstance(policy.recompute, SelectiveRecompute) else ()
    norms = _hidden(shape, layout) * (2 if "layernorm" in left_out else 4)  # inputs, and outputs
    attention = _attention(shape, layout, again="core_attn" in left_out) // layout.tensor_parallel_size
    moe = shape.moe
    if moe is None or not with_experts:
        mlp = 0 if "mlp" in left_out else 3 * shape.ffn_hidden_size // layout.tensor_parallel_size
        return norms + attention + mlp
    if "moe" in left_out:
        return norms + attention
    shared = 0 if "shared_experts" in left_out else 3 * moe.shared_ffn_hidden_size
    return norms + attention + shared // layout.tensor_parallel_size + _experts(shape, moe, layout)


def _hidden(shape: ModelShape, layout: LayoutConfig) -> int:
    """A hidden state, of which sequence parallelism gives each rank a part."""
    return shape.hidden_size // (layout.tensor_parallel_size if layout.sequence_parallel else 1)


def _attention(shape: ModelShape, layout: LayoutConfig, *, again: bool) -> int:
    """Queries, keys and values, the first two also before their rotation, and what comes out.

    Under context parallelism keys and values of all ranks are collected.
    """
    if shape.mla is None:
        query = output = shape.num_attention_heads * shape.head_dim
        key = value = shape.num_key_value_heads * shape.head_dim
        latents = 0
    else:
        query = key = shape.num_attention_heads * (shape.mla.head_dim + shape.mla.rotary_dim)
        output = value = shape.num_attention_heads * shape.mla.value_dim
        latents = 2 * ((shape.mla.query_rank or 0) + shape.mla.key_value_rank)
    before = latents + query + key + value + output
    others = (key + value) * (layout.context_parallel_size - 1)
    return before if again else before + query + key + others


def _experts(shape: ModelShape, moe: MoeShape, layout: LayoutConfig) -> int:
    """Copies of the token for its experts and what they make of it, with experts equally busy."""
    copies = moe.top_k * layout.expert_tensor_parallel_size
    widths = 2 * shape.hidden_size + 3 * moe.ffn_hidden_size // layout.expert_tensor_parallel_size
    return copies * widths // (layout.tensor_parallel_size if layout.sequence_parallel else 1)
