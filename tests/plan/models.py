"""Model folders of names and numbers only: what the plan reads, and no weights."""

import json
from pathlib import Path
from typing import Any

# 8 query and 4 key-value heads of 16, 6 layers
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A Llama folder whose weights and tokenizer are empty files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder
