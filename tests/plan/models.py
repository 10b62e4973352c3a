"""Model folders of names and numbers only: what the plan reads, and no weights."""

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape

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
    """A Llama folder with an empty tokenizer, and weights that take no room: a header and a hole."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}', encoding="utf-8")
    write_weights(folder / "model.safetensors", hf_tensors(load_shape(folder)))
    return folder


def write_weights(file: Path, tensors: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> None:
    """A safetensors file of zeros, 4 bytes each."""
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    written = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(written)) + written)
    os.truncate(file, 8 + len(written) + end)


def with_layers(model: Path, number: int) -> None:
    """Make the model one with layers for further tokens, weights included."""
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    fields |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": number}
    (model / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    write_weights(model / "model.safetensors", hf_tensors(load_shape(model, with_mtp=True)))
