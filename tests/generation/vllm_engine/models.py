"""Tiny random models of 8 heads, which two processes divide."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

VOCABULARY = 97  # vLLM rounds it up to 128 rows
HEADS = 8
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "head_dim": 32,  # the least that attention on a CPU takes
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo": ("MiMoConfig", {"tie_word_embeddings": False, "num_nextn_predict_layers": 1}),
    "qwen3_moe": ("Qwen3MoeConfig", {"tie_word_embeddings": False, **_EXPERTS}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),  # which has biases
    "gpt_oss": (
        "GptOssConfig",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
            **{"tie_word_embeddings": False, "sliding_window": 16},
        },
    ),
}


def write_tokenizer(folder: Path) -> Tokenizer:
    """A letter for each token."""
    tokenizer = Tokenizer(WordLevel({chr(ord("!") + n): n for n in range(VOCABULARY)}, unk_token="!"))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def make(family: str, folder: Path, seed: int = 7) -> Any:
    """A model of transformers, saved into `folder`: weights that differ clearly, norms included."""
    import transformers

    from tests.models import mtp_models

    name, own = FAMILIES[family]
    config = getattr(mtp_models if family == "mimo" else transformers, name)(**_COMMON | own)
    torch.manual_seed(seed)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    network.save_pretrained(folder)
    return network
