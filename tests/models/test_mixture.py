"""Families with experts: where each expert's weights lie on disk and on a rank, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.config.policy import LayoutConfig
from nemorl.models.hf_config import UnsupportedModel
from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import policy_rank, policy_slices
from nemorl.models.registry import shape_from_config
from nemorl.models.shape import ModelShape, MoeShape
from tests.models.megatron_ranks import empty_parameters
from tests.models.tiny_models import CONFIGS, TinyModel, write_tiny

EP2_ETP2 = LayoutConfig(data_parallel_size=4, expert_parallel_size=2, expert_tensor_parallel_size=2)
LAYER = "decoder.layers.2.mlp."
EXPERT = LAYER + "experts.local_experts.3."


@pytest.fixture(scope="module")
def tiny_gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny("gpt-oss", tmp_path_factory.mktemp("gpt-oss"))


def on_rank(tiny: TinyModel, number: int) -> dict[str, Tensor]:
    rank = policy_rank(EP2_ETP2, number)
    parameters = empty_parameters(tiny.shape, rank)
    HfFolder(tiny.folder).load_into(parameters, policy_slices(tiny.shape, rank))
    return parameters


@pytest.mark.parametrize(
    ("name", "prefix", "gate", "up", "down"),
    [
        ("qwen3-moe", "model.layers.2.mlp.experts", "gate_proj", "up_proj", "down_proj"),
        ("mixtral", "model.layers.2.block_sparse_moe.experts", "w1", "w3", "w2"),
    ],
)
def test_experts_are_divided_over_ep_and_their_matrices_over_etp(
    tmp_path: Path, name: str, prefix: str, gate: str, up: str, down: str
) -> None:
    """Rank 3 of 4 is the second of EP, with experts 4 to 7 of 8, and the second of ETP."""
    tiny = write_tiny(name, tmp_path)
    gate, up, down = (f"{prefix}.7.{x}.weight" for x in (gate, up, down))
    parameters = on_rank(tiny, 3)
    halves = [tiny.tensors[x].chunk(2)[1] for x in (gate, up)]
    assert torch.equal(parameters[EXPERT + "linear_fc1.weight"], torch.cat(halves))
    assert torch.equal(parameters[EXPERT + "linear_fc2.weight"], tiny.tensors[down].chunk(2, 1)[1])
    router = tiny.tensors[f"{prefix.removesuffix('.experts')}.gate.weight"]
    assert torch.equal(parameters[LAYER + "router.weight"], router)


def test_gpt_oss_interleaves_gate_and_up(tiny_gpt_oss: TinyModel) -> None:
    """On disk [expert, input, (row, gate or up)]; Megatron requires [the gate's rows, then up's, input]."""
    tensors = {name.removeprefix("model.layers.2."): t for name, t in tiny_gpt_oss.tensors.items()}
    parameters = on_rank(tiny_gpt_oss, 3)
    both = tensors["mlp.experts.gate_up_proj"][7]
    halves = [both[:, start::2].t().chunk(2)[1] for start in (0, 1)]
    assert torch.equal(parameters[EXPERT + "linear_fc1.weight"], torch.cat(halves))
    both = tensors["mlp.experts.gate_up_proj_bias"][7]
    assert torch.equal(
        parameters[EXPERT + "linear_fc1.bias"], torch.cat([both[start::2].chunk(2)[1] for start in (0, 1)])
    )
    down = tensors["mlp.experts.down_proj"][7]
    assert torch.equal(parameters[EXPERT + "linear_fc2.weight"], down.t().chunk(2, 1)[1])
    assert torch.equal(parameters[EXPERT + "linear_fc2.bias"], tensors["mlp.experts.down_proj_bias"][7])
    assert torch.equal(parameters[LAYER + "router.bias"], tensors["mlp.router.bias"])


def test_gpt_oss_divides_its_sinks_as_its_heads(tiny_gpt_oss: TinyModel) -> None:
    rank = policy_rank(LayoutConfig(tensor_parallel_size=4), 2)
    parameters = empty_parameters(tiny_gpt_oss.shape, rank)
    HfFolder(tiny_gpt_oss.folder).load_into(parameters, policy_slices(tiny_gpt_oss.shape, rank))
    sinks = tiny_gpt_oss.tensors["model.layers.0.self_attn.sinks"]
    name = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    assert torch.equal(parameters[name], sinks[4:6])


def test_shapes_of_published_models() -> None:
    """Fields of Qwen3-30B-A3B's and gpt-oss-20b's config.json, under the names of transformers 4."""
    qwen = shape(
        "qwen3-moe",
        num_experts=128,
        num_local_experts=None,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )
    assert qwen.moe == MoeShape(num_experts=128, top_k=8, ffn_hidden_size=768)
    oss = shape(
        "gpt-oss",
        num_local_experts=32,
        num_experts_per_tok=4,
        intermediate_size=2880,
        sliding_window=128,
        rope_parameters=None,
        rope_theta=150000,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
    )
    assert oss.moe == MoeShape(num_experts=32, top_k=4, ffn_hidden_size=2880, router_bias=True)
    assert oss.windows == (128, None, 128, None)
    assert shape("gpt-oss", sliding_window=128, layer_types=None).windows == oss.windows
    assert (oss.rope.theta, oss.sinks, oss.activation) == (150000, True, "clamped_swiglu")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3-moe", {"mlp_only_layers": [0, 2]}, r"mlp_only_layers is \[0, 2\]; only the first layers"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("qwen3-moe", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1; a softmax over the chosen"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; .* requires 2 to 8 of them"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("gpt-oss", {"swiglu_limit": 6.0}, "swiglu_limit is 6.0; for GptOssForCausalLM only 7.0"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, "save it without quantization first"),
        ("gpt-oss", {"layer_types": ["chunked_attention"] * 4}, r"layer_types\[0\] is 'chunked_attention'"),
    ],
)
def test_what_is_not_supported_is_named(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        shape(name, **fields)


def shape(name: str, **fields: Any) -> ModelShape:
    """Of a tiny model's config.json with other fields."""
    config = json.loads(CONFIGS[name].to_json_string(use_diff=False))
    architectures = {
        "qwen3-moe": "Qwen3MoeForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "gpt-oss": "GptOssForCausalLM",
    }
    return shape_from_config({**config, "architectures": [architectures[name]], **fields}, "config.json")
