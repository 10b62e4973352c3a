"""Tiny random models of every family, written by transformers itself."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

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
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "llama-tied": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**COMMON),
    "qwen2-tied": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
}


@dataclass(frozen=True)
class TinyModel:
    folder: Path
    shape: ModelShape
    tensors: dict[str, Tensor]  # transformers' state, without the second name of tied embeddings


def write_tiny(name: str, folder: Path) -> TinyModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for parameter in model.parameters():  # norms and biases too: transformers leaves them at one and zero
        parameter.data.normal_()
    model.save_pretrained(folder)
    shape = ModelShape.load(folder)
    tensors = {
        tensor_name: tensor
        for tensor_name, tensor in model.state_dict().items()
        if not (tensor_name == "lm_head.weight" and CONFIGS[name].tie_word_embeddings)
    }
    return TinyModel(folder, shape, tensors)
