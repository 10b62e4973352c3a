"""What is refused of TensorRT-LLM's settings."""

import pytest
from pydantic import TypeAdapter

from nemorl.config.checks.engines import (
    TRTLLM_OWN_ARGUMENTS,
    trtllm_arguments_are_free,
    trtllm_experts_fit,
    trtllm_step_holds_prompt,
    trtllm_updates_in_flight,
    trtllm_wants_gpus,
)
from nemorl.config.checks.resources import changes_have_a_base
from nemorl.config.generation import GenerationConfig, TorchGenerationConfig, TrtllmGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig


def config(**fields):
    return TrtllmGenerationConfig(backend="trtllm", **fields)


def fields_of(problems):
    return [problem.field for problem in problems]


def test_the_backend_is_chosen_by_its_name():
    read = TypeAdapter(GenerationConfig).validate_python({"backend": "trtllm", "tensor_parallel_size": 4})
    assert isinstance(read, TrtllmGenerationConfig)
    assert read.ranks_per_replica == 4


def test_it_wants_gpus():
    assert fields_of(trtllm_wants_gpus(ClusterConfig(), config())) == ["generation.backend"]
    assert not list(trtllm_wants_gpus(ClusterConfig(gpus_per_node=8), config()))
    assert not list(trtllm_wants_gpus(ClusterConfig(), TorchGenerationConfig()))


def test_changes_want_a_receiver_that_keeps_what_came():
    refused = config(delta=True, weight_delivery="workers")
    assert fields_of(changes_have_a_base(refused)) == ["generation.delta"]
    assert not list(changes_have_a_base(config(delta=True, weight_delivery="handles")))
    assert not list(changes_have_a_base(config(weight_delivery="workers")))


@pytest.mark.parametrize(
    ("tensor", "expert", "sound"), [(None, None, True), (2, 4, True), (None, 8, True), (2, 2, False)]
)
def test_expert_sizes_multiply_to_the_tensor_parallel_size(tensor, expert, sound):
    sizes = config(tensor_parallel_size=8, moe_tensor_parallel_size=tensor, moe_expert_parallel_size=expert)
    assert (not list(trtllm_experts_fit(sizes))) == sound


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({}, []),
        ({"recompute_kv_cache": True}, ["generation.recompute_kv_cache"]),
        ({"in_flight_updates": True}, ["generation.prefix_caching"]),
        ({"in_flight_updates": True, "prefix_caching": False}, []),
        ({"in_flight_updates": True, "recompute_kv_cache": True}, []),
        (
            {"in_flight_updates": True, "recompute_kv_cache": True, "pipeline_parallel_size": 2},
            ["generation.in_flight_updates"],
        ),
    ],
)
def test_updates_in_flight_keep_versions_and_caches_apart(fields, wrong):
    assert fields_of(trtllm_updates_in_flight(config(**fields))) == wrong


def test_arguments_that_follow_from_fields_are_not_given_twice():
    given = {"dtype": "float16", "cuda_graph_config": None}
    assert fields_of(trtllm_arguments_are_free(config(trtllm_kwargs=given))) == [
        "generation.trtllm_kwargs.dtype"
    ]
    assert "trust_remote_code" not in TRTLLM_OWN_ARGUMENTS


@pytest.mark.parametrize(("kwargs", "wrong"), [({}, True), ({"enable_chunked_prefill": True}, False)])
def test_a_step_holds_a_whole_prompt_unless_it_is_cut(kwargs, wrong):
    policy = PolicyConfig(model_path="m", max_sequence_length=9000, micro_batch_tokens=9000)
    problems = trtllm_step_holds_prompt(policy, config(max_num_tokens=8192, trtllm_kwargs=kwargs))
    assert fields_of(problems) == ["generation.max_num_tokens"] * wrong
