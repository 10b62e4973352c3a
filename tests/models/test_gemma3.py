"""Gemma 3's config.json, as published and as transformers 5 writes it."""

from typing import Any

import pytest

from nemorl.models.hf_config import UnsupportedModel
from nemorl.models.registry import shape_from_config
from nemorl.models.shape import LinearRopeScaling, Rope

GEMMA_3_1B: dict[str, Any] = {  # as published
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**GEMMA_3_1B, **fields}


def test_the_published_model() -> None:
    shape = shape_from_config(GEMMA_3_1B, "config.json")
    assert shape.windows == (*(512, 512, 512, 512, 512, None) * 4, 512, 512)
    assert (shape.rope, shape.local_rope) == (Rope(1e6), Rope(1e4))
    assert shape.softmax_scale == pytest.approx(1 / 16)
    assert shape.embedding_scale == pytest.approx(33.941125)
    assert shape.tied_embeddings  # the default of this family
    assert shape.qk_norm and shape.post_norms and shape.zero_centered_norm  # noqa: PT018
    assert shape.activation == "gelu_tanh"


def test_transformers_5_says_the_same_in_other_fields() -> None:
    newer = changed(
        layer_types=[*["sliding_attention"] * 5, "full_attention"] * 4 + ["sliding_attention"] * 2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )
    for field in ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"):
        del newer[field]
    older = changed(rope_scaling={"rope_type": "linear", "factor": 8.0})
    shape = shape_from_config(newer, "")
    assert shape == shape_from_config(older, "")
    assert shape.rope.scaling == LinearRopeScaling(8.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; a policy looks at"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "names 'Gemma3ForConditionalGeneration'"),
        ({"layer_types": ["chunked_attention"] * 26}, r"layer_types\[0\] is 'chunked_attention'"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        shape_from_config(changed(**fields), "m/config.json")
