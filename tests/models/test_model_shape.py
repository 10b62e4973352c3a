"""What a config.json says, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel
from nemorl.models.registry import family_of, load_shape, shape_from_config
from nemorl.models.shape import Dim, Llama3RopeScaling, ModelShape, Rope
from tests.models.tiny_models import LLAMA3_ROPE, TinyModel

LLAMA_3_2_1B = {  # as published
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**LLAMA_3_2_1B, **fields}


def test_an_older_config_is_read() -> None:
    shape = shape_from_config(LLAMA_3_2_1B, "config.json")
    assert shape == ModelShape(
        family="llama",
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        tied_embeddings=True,
        rope=Rope(500000.0, Llama3RopeScaling(32.0, 1.0, 4.0, 8192)),
        rms_norm_eps=1e-5,
        qkv_bias=False,
        qk_norm=False,
        max_position_embeddings=131072,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
        torch_dtype="bfloat16",
    )


def test_rope_parameters_of_transformers_5_say_the_same_as_the_older_fields() -> None:
    newer = changed(rope_parameters=LLAMA3_ROPE)
    del newer["rope_theta"], newer["rope_scaling"]
    older = changed(rope_scaling={**LLAMA_3_2_1B["rope_scaling"], "factor": 8.0})  # type: ignore[dict-item]
    assert shape_from_config(newer, "") == shape_from_config(older, "")


def test_every_family_reads_what_transformers_writes(tiny: TinyModel) -> None:
    config = json.loads((tiny.folder / "config.json").read_text())
    shape = tiny.shape
    assert config["architectures"][0] in family_of(shape).architectures
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (4, 32, 101)
    assert shape.qkv_bias == any(name.endswith("q_proj.bias") for name in tiny.tensors)
    assert shape.qk_norm == any(name.endswith("q_norm.weight") for name in tiny.tensors)
    queries = next(name for name in tiny.tensors if name.endswith(("q_proj.weight", "q_b_proj.weight")))
    assert shape.extent(Dim.QUERY) == tiny.tensors[queries].shape[0]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    assert shape.rope.theta == rope["rope_theta"]
    assert (shape.rope.scaling is not None) == (rope["rope_type"] in ("llama3", "yarn"))


def test_defaults_are_those_of_transformers() -> None:
    bare = changed()
    for field in ("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "torch_dtype"):
        del bare[field]
    shape = shape_from_config(bare, "")
    assert (shape.head_dim, shape.num_key_value_heads) == (2048 // 32, 32)
    assert (shape.rope, shape.torch_dtype) == (Rope(10000.0), "float32")
    assert shape_from_config({**bare, "architectures": ["Qwen3ForCausalLM"]}, "").head_dim == 128


def test_end_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(eos_token_id=7)))
    assert load_shape(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_shape(tmp_path).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            "architectures names 'FalconForCausalLM'; supported are Ll",
        ),
        ({"architectures": None}, r"architectures names '\(none\)'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; for LlamaForCausalLM only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; for LlamaForCausalLM only False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope_scaling.rope_type is 'dynamic'; only 'default'",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is 'longrope'"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor is 0.5",
        ),
        (
            {"torch_dtype": "float8_e4m3fn"},
            "dtype is 'float8_e4m3fn'; supported are float32, bfloat16, float16",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
            "use_sliding_window is True; for Qwen2ForCausalLM only False",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types\[1\] is 'sliding_attention'; only 'full_attention'",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "attention_bias is True"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        shape_from_config(changed(**fields), "m/config.json")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "m/config.json: hidden_size is None, expected an integer of at least 1"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        (
            {"num_key_value_heads": 5},
            r"num_attention_heads \(32\) is not a multiple of num_key_value_heads \(5\)",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            "rope_type 'llama3' lacks low_freq_factor, high",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenModelFolder, match=message):
        shape_from_config(changed(**fields), "m/config.json")


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenModelFolder, match=r"config\.json is missing"):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BrokenModelFolder, match="not valid JSON"):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BrokenModelFolder, match="holds a list"):
        load_shape(tmp_path)
