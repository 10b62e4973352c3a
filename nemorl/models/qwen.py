"""Qwen3 with experts (arXiv 2505.09388): Qwen3's attention, and a softmax over the chosen experts."""

from .family import ModelFamily
from .hf_config import HfConfig, decoder_shape, refuse_windows
from .llama import LLAMA_WEIGHTS
from .mixture import gated_experts, softmax_top_k
from .qwen3 import QK_NORMS
from .shape import ModelShape, MoeShape

_MLP = "model.layers.{layer}.mlp."
_EXPERT = _MLP + "experts.{expert}."
EXPERTS = gated_experts(
    router=_MLP + "gate.weight",
    gate=_EXPERT + "gate_proj.weight",
    up=_EXPERT + "up_proj.weight",
    down=_EXPERT + "down_proj.weight",
)


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=False, use_sliding_window=False, decoder_sparse_step=1)
    refuse_windows(config)
    dense = config.get("mlp_only_layers", [])
    if sorted(dense) != list(range(len(dense))):
        raise config.unsupported("mlp_only_layers", "only the first layers may be without experts")
    # The name on disk until transformers 4 and since 5.
    num_experts = config.integer("num_experts" if config.get("num_experts") else "num_local_experts")
    moe = MoeShape(
        num_experts=num_experts,
        top_k=softmax_top_k(config, num_experts),
        ffn_hidden_size=config.integer("moe_intermediate_size"),
        first_layer=len(dense),
        normalize=bool(config.get("norm_topk_prob", False)),
    )
    return decoder_shape(config, "qwen3_moe", qk_norm=True, head_dim=config.get("head_dim", 128), moe=moe)


QWEN3_MOE = ModelFamily(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    _read,
    lambda shape: (*LLAMA_WEIGHTS, *QK_NORMS, *EXPERTS),
)
