"""Shapes of the models that most recipes train: fields of their config.json on the hub."""

from typing import Any


def _llama(hidden: int, wide: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": tied,
        "eos_token_id": 128001,
    }


def _qwen2(hidden: int, wide: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": hidden < 2000,
        "eos_token_id": 151643,
    }


def _qwen3(hidden: int, wide: int, layers: int, heads: int) -> dict[str, Any]:
    of_qwen2 = _qwen2(hidden, wide, layers, heads, 8, 151936)
    return of_qwen2 | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128}


def _qwen3_moe(hidden: int, of_expert: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        **_qwen2(hidden, 3 * hidden, layers, heads, 4, 151936),
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": of_expert,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


CONFIGS = {
    "meta-llama/Llama-3.1-8B": _llama(4096, 14336, 32, 32),
    "meta-llama/Llama-3.1-8B-Instruct": _llama(4096, 14336, 32, 32),
    "meta-llama/Llama-3.1-70B": _llama(8192, 28672, 80, 64),
    "meta-llama/Llama-3.3-70B-Instruct": _llama(8192, 28672, 80, 64),
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, tied=True),
    "meta-llama/Llama-3.2-1B-Instruct": _llama(2048, 8192, 16, 32, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, 151936),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(1536, 8960, 28, 12, 2, 151936),
    "Qwen/Qwen2.5-Math-1.5B-Instruct": _qwen2(1536, 8960, 28, 12, 2, 151936),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(1536, 8960, 28, 12, 2, 151936),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(3584, 18944, 28, 28, 4, 152064),
    "Qwen/Qwen2.5-Math-7B": _qwen2(3584, 18944, 28, 28, 4, 152064),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8, 152064),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen/Qwen3-8B-Base": _qwen3(4096, 12288, 36, 32),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 768, 48, 32),
    "Qwen/Qwen3-30B-A3B-Base": _qwen3_moe(2048, 768, 48, 32),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 1536, 94, 64),
}
