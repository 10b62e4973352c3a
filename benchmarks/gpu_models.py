"""Models of the GPU benchmark, as fields of their config.json, with random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape

# bfloat16 attention on CUDA requires heads whose size is a multiple of 8.
_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _TINY | {"architectures": ["LlamaForCausalLM"]},
    "mistral": _TINY | {"architectures": ["MistralForCausalLM"], "sliding_window": 6},
    "mixtral": _TINY | _EXPERTS | {"architectures": ["MixtralForCausalLM"]},
    "qwen2": _TINY | {"architectures": ["Qwen2ForCausalLM"], "head_dim": 8},
    "qwen3": _TINY | {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3-moe": _TINY
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    },
    "gemma3": _TINY
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_local_base_freq": 1000.0,
        "tie_word_embeddings": True,
    },
    "gpt-oss": _TINY
    | _EXPERTS
    | {
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
    "deepseek-v3": _TINY
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 8,
        "head_dim": 8,
        "n_shared_experts": 2,
        "n_routed_experts": 8,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 24,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        "attention_bias": False,
    },
}
# Qwen2.5-1.5B.
LARGE: dict[str, Any] = _TINY | {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
# Used in its place where only the code is tried.
SMALL: dict[str, Any] = LARGE | {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def write_config(config: Mapping[str, Any], folder: Path) -> Path:
    """A model folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_random(config: Mapping[str, Any], folder: Path) -> Path:
    """A model folder with float32 weights of which none is constant, not even of norms and biases."""
    write_config(config, folder)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, size in hf_tensors(load_shape(folder)).items():
        drawn = torch.randn(size, generator=generator)
        if "norm" in name:
            tensors[name] = 0.3 * drawn + (0 if config["architectures"] == ["Gemma3ForCausalLM"] else 1)
        else:
            tensors[name] = 0.15 * drawn
    save_file(tensors, folder / "model.safetensors")
    return folder


@torch.no_grad()
def fill(weights: Mapping[str, Tensor]) -> None:
    """Random weights in place, as a model has them before training."""
    for values in weights.values():
        if values.dim() == 1:
            values.fill_(1.0)
        else:
            values.normal_(std=0.02)
