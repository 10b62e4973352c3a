"""DeepSeek-V3's config.json, its router, and the layers that are left on disk."""

import math
from typing import Any

import pytest

from nemorl.config.policy import LayoutConfig
from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel
from nemorl.models.layout import PolicyRank, hf_tensors, policy_slices
from nemorl.models.registry import shape_from_config
from nemorl.models.shape import MlaShape, MoeShape, YarnRopeScaling

DEEPSEEK_V3: dict[str, Any] = {  # as published, but for quantization_config
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**DEEPSEEK_V3, **fields}


def test_the_published_model() -> None:
    shape = shape_from_config(DEEPSEEK_V3, "config.json")
    assert shape.mla == MlaShape(1536, 512, head_dim=128, rotary_dim=64, value_dim=128)
    assert shape.moe == MoeShape(
        num_experts=256,
        top_k=8,
        ffn_hidden_size=2048,
        first_layer=3,
        shared_ffn_hidden_size=2048,
        scores="sigmoid",
        scaling=2.5,
        num_groups=8,
        groups_per_token=4,
        expert_bias=True,
    )
    # Cosines and sines stay, as both sharpenings are the same; the softmax has it, squared.
    assert shape.rope.scaling == YarnRopeScaling(40, 4096)
    assert shape.softmax_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert (shape.head_dim, shape.rotary_dim) == (192, 64)
    assert [shape.is_moe(layer) for layer in range(5)] == [False, False, False, True, True]


def test_without_rope_scaling_the_softmax_scale_is_the_usual() -> None:
    shape = shape_from_config(changed(rope_scaling=None), "")
    assert shape.softmax_scale == pytest.approx(192**-0.5)


def test_sharpening_requires_a_factor_where_positions_are_scaled_at_all() -> None:
    """As in transformers, where `mscale_all_dim` next to the plain rotation says nothing."""
    plain = {"rope_type": "default", "rope_theta": 10000.0, "mscale_all_dim": 1.0}
    shape = shape_from_config(changed(rope_scaling=None, rope_parameters=plain), "")
    assert shape.softmax_scale == pytest.approx(192**-0.5)

    without_factor = {"type": "yarn", "mscale_all_dim": 1.0}
    with pytest.raises(BrokenModelFolder, match="rope_scaling of rope_type 'yarn' lacks factor"):
        shape_from_config(changed(rope_scaling=without_factor), "m/config.json")


def test_one_group_is_no_group() -> None:
    moe = shape_from_config(changed(n_group=1, topk_group=1), "").moe
    assert moe is not None
    assert (moe.num_groups, moe.groups_per_token) == (1, 1)


def test_the_published_size_and_no_layer_that_predicts_further_tokens() -> None:
    """671 billion parameters (arXiv 2412.19437, abstract) without the 61 + 1st layer, whose are 11.5 more."""
    tensors = hf_tensors(shape_from_config(DEEPSEEK_V3, ""))
    assert sum(math.prod(extents) for extents in tensors.values()) == pytest.approx(671.03e9, rel=1e-4)
    assert not any(name.startswith("model.layers.61.") for name in tensors)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"topk_group": 2}, "topk_group is 2; a group has to be judged by its two best experts"),
        ({"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "num_experts_per_tok is 1"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        shape_from_config(changed(**fields), "m/config.json")


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"q_lora_rank": 1540}, r"1540 rows of the compressed query \(q_lora_rank\)"),
        ({"kv_lora_rank": 516}, r"580 rows of the compressed key and value \(kv_lora_rank \+ qk_rope"),
    ],
)
def test_latents_that_do_not_divide_are_refused(fields: dict[str, Any], what: str) -> None:
    shape = shape_from_config(changed(**fields), "")
    with pytest.raises(ValueError, match=f"tensor_parallel_size is 8: it must divide the model's {what}"):
        policy_slices(shape, PolicyRank(LayoutConfig(tensor_parallel_size=8)))
