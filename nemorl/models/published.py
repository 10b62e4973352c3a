"""Shapes of published models by their ids on the Hugging Face hub, for plans without a network or weights.

Of each config.json the fields that decide on sizes, positions and the end of a sequence; the file itself,
where there is one, has the last word. tests/models/test_published.py names the public copies with which they
were compared, and compares the number of weights that follow from them with published ones. OpenAI and
DeepSeek publish theirs quantized: the ids are of copies in bfloat16; that of Gemma's 27B is a copy of the
text model without the one for images.
"""

from collections.abc import Mapping
from typing import Any


def _dense(
    architecture: str, hidden: int, wide: int, layers: int, heads: tuple[int, int], **others: Any
) -> dict[str, Any]:
    """`heads` are those of queries and of keys."""
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **others,
    }


def _smollm2(hidden: int, wide: int, layers: int, heads: tuple[int, int], theta: float) -> dict[str, Any]:
    others = {"vocab_size": 49152, "max_position_embeddings": 8192, "eos_token_id": 2, "rope_theta": theta}
    return _dense("Llama", hidden, wide, layers, heads, tie_word_embeddings=True, rms_norm_eps=1e-5, **others)


def _llama3(
    hidden: int, wide: int, layers: int, heads: int, *, factor: float = 8.0, is_base: bool = False
) -> dict[str, Any]:
    """A larger `factor` of the rotary scaling is that of the small models, whose embeddings are tied.

    A base model ends at the end of a text, an instructed one also at the end of a message or a turn.
    """
    return _dense(
        *("Llama", hidden, wide, layers, (heads, 8)),
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=factor > 8,
        eos_token_id=128001 if is_base else [128001, 128008, 128009],
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling={
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


def _qwen2(hidden: int, wide: int, layers: int, heads: tuple[int, int], **others: Any) -> dict[str, Any]:
    common = {"vocab_size": 152064, "max_position_embeddings": 32768, "eos_token_id": 151645}
    return _dense("Qwen2", hidden, wide, layers, heads, **{**common, "rope_theta": 1e6, **others})


def _qwen3(hidden: int, wide: int, layers: int, heads: tuple[int, int], **others: Any) -> dict[str, Any]:
    common = {"vocab_size": 151936, "max_position_embeddings": 40960, "eos_token_id": 151645}
    all_of = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "rope_theta": 1e6, **common, **others}
    return _dense("Qwen3", hidden, wide, layers, heads, **all_of)


def _qwen3_moe(hidden: int, wide: int, layers: int, heads: tuple[int, int], expert: int) -> dict[str, Any]:
    return _qwen3(
        *(hidden, wide, layers, heads),
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=expert,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _oss(layers: int, experts: int) -> dict[str, Any]:
    return _dense(
        *("GptOss", 2880, 2880, layers, (64, 8)),
        head_dim=64,
        vocab_size=201088,
        max_position_embeddings=131072,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        attention_bias=True,
        eos_token_id=200002,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    )


def _deepseek(hidden: int, wide: int, layers: int, heads: int, expert: int, **others: Any) -> dict[str, Any]:
    return _dense(
        *("DeepseekV3", hidden, wide, layers, (heads, heads)),
        moe_intermediate_size=expert,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        **others,
    )


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _smollm2(576, 1536, 30, (9, 3), 1e5),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _smollm2(2048, 8192, 24, (32, 32), 1.3e5),
    "meta-llama/Llama-3.2-1B-Instruct": _llama3(2048, 8192, 16, 32, factor=32.0),
    "meta-llama/Llama-3.2-3B-Instruct": _llama3(3072, 8192, 28, 24, factor=32.0),
    "meta-llama/Llama-3.1-8B": _llama3(4096, 14336, 32, 32, is_base=True),
    "meta-llama/Llama-3.1-8B-Instruct": _llama3(4096, 14336, 32, 32),
    "Skywork/Skywork-Reward-V2-Llama-3.1-8B": _llama3(4096, 14336, 32, 32)
    | {"architectures": ["LlamaForSequenceClassification"]},
    "meta-llama/Llama-3.1-70B": _llama3(8192, 28672, 80, 64, is_base=True),
    "meta-llama/Llama-3.3-70B-Instruct": _llama3(8192, 28672, 80, 64),
    "mistralai/Mistral-Small-24B-Instruct-2501": _dense(
        *("Mistral", 5120, 32768, 40, (32, 8)),
        head_dim=128,
        vocab_size=131072,
        max_position_embeddings=32768,
        sliding_window=None,
        eos_token_id=2,
        rms_norm_eps=1e-5,
        rope_theta=1e8,
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(
        1536, 8960, 28, (12, 2), vocab_size=151936, tie_word_embeddings=True
    ),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(3584, 18944, 28, (28, 4)),
    "Qwen/Qwen2.5-32B": _qwen2(
        *(5120, 27648, 64, (40, 8)),
        max_position_embeddings=131072,
        eos_token_id=151643,
        rms_norm_eps=1e-5,
    ),
    "XiaomiMiMo/MiMo-7B-Base": _qwen2(
        *(4096, 11008, 36, (32, 8)),
        architectures=["MiMoForCausalLM"],
        num_nextn_predict_layers=1,
        vocab_size=151680,
        eos_token_id=151643,
        rms_norm_eps=1e-5,
        rope_theta=6.4e5,
    ),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, (16, 8), tie_word_embeddings=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, (16, 8), tie_word_embeddings=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, (32, 8), tie_word_embeddings=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, (32, 8)),
    "Qwen/Qwen3-8B-Base": _qwen3(
        4096, 12288, 36, (32, 8), max_position_embeddings=32768, eos_token_id=151643
    ),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, (40, 8)),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, (64, 8)),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 6144, 48, (32, 4), 768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 12288, 94, (64, 4), 1536),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _dense(
        *("Mixtral", 4096, 14336, 32, (32, 8)),
        vocab_size=32000,
        max_position_embeddings=32768,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
        eos_token_id=2,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
    ),
    "lmsys/gpt-oss-20b-bf16": _oss(24, 32),
    "lmsys/gpt-oss-120b-bf16": _oss(36, 128),
    "unsloth/DeepSeek-V3-bf16": _deepseek(
        *(7168, 18432, 61, 128, 2048),
        q_lora_rank=1536,
        first_k_dense_replace=3,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        vocab_size=129280,
        max_position_embeddings=163840,
        eos_token_id=1,
        rope_theta=1e4,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "google/gemma-3-1b-it": _dense(
        *("Gemma3", 1152, 6912, 26, (4, 1)),
        head_dim=256,
        vocab_size=262144,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        sliding_window=512,
        query_pre_attn_scalar=256,
        eos_token_id=[1, 106],
        rope_theta=1e6,
    ),
    "Changgil/google-gemma-3-27b-it-text": _dense(
        *("Gemma3", 5376, 21504, 62, (32, 16)),
        head_dim=128,
        vocab_size=262208,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        sliding_window=1024,
        query_pre_attn_scalar=168,
        eos_token_id=[1, 106],
        rope_theta=1e6,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
}
