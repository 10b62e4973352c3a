"""Models of the benchmarks, as fields of their config.json, and the layouts of both sides of a refit."""

from collections.abc import Mapping
from typing import Any

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout import PolicyRank, policy_rank, policy_slices
from nemorl.models.registry import shape_from_config
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice
from nemorl.weights.messages import ReceiverLayout, SenderLayout

DTYPE = "bfloat16"  # of engines
RANKS_PER_NODE = 8

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "rope_theta": 10000.0,
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 512,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V3 = DENSE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
QWEN3_30B = _QWEN3_MOE | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
}
QWEN3_235B = _QWEN3_MOE | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """A model's shape from the fields of its config.json."""
    return shape_from_config(config, "benchmarks/refit.py")


def layouts_of(
    shape: ModelShape, policy: LayoutConfig, engine: LayoutConfig, num_replicas: int
) -> tuple[list[SenderLayout], list[ReceiverLayout]]:
    """Both sides, each with machines of its own."""
    held: dict[PolicyRank, tuple[TensorSlice, ...]] = {}

    def slices(layout: LayoutConfig, rank: int) -> tuple[TensorSlice, ...]:
        place = policy_rank(layout, rank)
        if place not in held:
            held[place] = tuple(policy_slices(shape, place))
        return held[place]

    senders = [
        SenderLayout(slices(policy, rank), f"policy node {rank // RANKS_PER_NODE}")
        for rank in range(policy.world_size)
    ]
    of_replica = [slices(engine, rank) for rank in range(engine.world_size)]
    receivers = [
        ReceiverLayout(part, (DTYPE,) * len(part), f"engine node {rank // RANKS_PER_NODE}")
        for rank, part in enumerate(of_replica * num_replicas)
    ]
    return senders, receivers
