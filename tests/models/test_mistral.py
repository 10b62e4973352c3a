"""Mistral's window: a number, null for none, and transformers' default where the field is missing."""

from typing import Any

import pytest

from nemorl.models.hf_config import UnsupportedModel
from nemorl.models.registry import shape_from_config
from nemorl.models.shape import Rope

MISTRAL_7B_V01: dict[str, Any] = {  # as published
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


def test_all_layers_have_the_window() -> None:
    shape = shape_from_config(MISTRAL_7B_V01, "config.json")
    assert shape.windows == (4096,) * 32
    assert (shape.family, shape.head_dim, shape.rope) == ("mistral", 128, Rope(10000.0))


def test_null_is_no_window_and_a_missing_field_is_the_default() -> None:
    later = {**MISTRAL_7B_V01, "sliding_window": None}
    assert shape_from_config(later, "").windows == ()
    del later["sliding_window"]
    assert shape_from_config(later, "").windows == (4096,) * 32


def test_layers_of_different_kinds_are_another_family() -> None:
    mixed = {**MISTRAL_7B_V01, "layer_types": ["full_attention"] * 32}
    with pytest.raises(UnsupportedModel, match=r"layer_types is .*for MistralForCausalLM only None"):
        shape_from_config(mixed, "")
