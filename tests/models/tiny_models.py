"""Tiny random models of every family, written by transformers itself."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape

torch.set_num_threads(1)

# 8 query and 4 key-value heads allow TP4; 101 tokens make padding of the vocabulary necessary
COMMON = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "llama-tied": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**COMMON),
    "qwen2-tied": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "mistral": MistralConfig(**COMMON, sliding_window=16),
    "gemma3": Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=16, sliding_window_pattern=3),
    "qwen3-moe": Qwen3MoeConfig(
        **COMMON,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        mlp_only_layers=[0],
    ),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=8),
    "gpt-oss": GptOssConfig(**COMMON, head_dim=16, num_local_experts=8),
    "deepseek-v3": DeepseekV3Config(**{**COMMON, **DEEPSEEK}),
    "deepseek-v3-plain-query": DeepseekV3Config(**{**COMMON, **DEEPSEEK, "q_lora_rank": None}),
}


@dataclass(frozen=True)
class TinyModel:
    folder: Path
    shape: ModelShape
    tensors: dict[str, Tensor]  # as transformers wrote them


def write_tiny(name: str, folder: Path) -> TinyModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for weight in model.state_dict().values():  # norms and biases too, which are ones and zeros at first
        weight.normal_()
    model.save_pretrained(folder)
    return TinyModel(folder, load_shape(folder), load_file(folder / "model.safetensors"))
