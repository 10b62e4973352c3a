"""Experiments to rehearse. Models are folders with a config.json only."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from tests.config import experiments

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1003,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
# Layers of the size of an 8B model, and of one with experts.
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
QWEN3_MOE = LLAMA_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MEGATRON = "{backend: megatron, max_batch_size: 4, max_new_tokens: 16, max_kv_tokens: 1024}"
VLLM = "{backend: vllm, max_new_tokens: 16}"


def write(folder: Path, model: Mapping[str, Any] = LLAMA, generation: str = MEGATRON) -> Path:
    """The file of an experiment."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(model)), encoding="utf-8")
    fields = yaml.safe_load(experiments.GRPO)
    fields["policy"] = {
        "model_path": str(folder),
        "precision": "bfloat16",
        "max_sequence_length": 128,
        "micro_batch_tokens": 256,
        # One that samples keeps its weights.
        "offload": {"weights": generation != MEGATRON, "optimizer": True},
    }
    fields["generation"] = yaml.safe_load(generation)
    fields["cluster"] = {"gpus_per_node": 8, "num_nodes": 256}
    fields["data"]["train"]["size"] = fields["data"]["validation"]["offset"] = 9000
    sampled = {"num_prompts_per_step": 32, "num_generations_per_prompt": 16}
    fields["algorithm"] |= {**sampled, "kl": {"coefficient": 0.01}}
    return experiments.write(folder, yaml.safe_dump(fields))


def experiment(
    folder: Path,
    model: Mapping[str, Any] = LLAMA,
    *,
    generation: str = MEGATRON,
    layout: Mapping[str, object] | None = None,
    **policy: object,
) -> Experiment:
    fields = {"layout": dict(layout or {}), **policy}
    overrides = [f"policy.{name}={json.dumps(value).replace(chr(34), '')}" for name, value in fields.items()]
    return load_experiment(write(folder, model, generation), overrides)
