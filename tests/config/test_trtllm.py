"""What is refused of TensorRT-LLM's settings."""

import pytest
from pydantic import TypeAdapter

from nemorl.config.generation import TRTLLM_DERIVED_ARGUMENTS, GenerationConfig, TrtllmGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig


def config(**fields):
    return TrtllmGenerationConfig(backend="trtllm", **fields)


def refused(generation, policy=None, cluster=None):
    """The fields with problems."""
    sections = {
        "policy": policy or PolicyConfig(model_path="m"),
        "cluster": cluster or ClusterConfig(gpus_per_node=8),
    }
    return [problem.field for problem in generation.problems(sections)]


def test_the_backend_is_chosen_by_its_name():
    read = TypeAdapter(GenerationConfig).validate_python({"backend": "trtllm", "tensor_parallel_size": 4})
    assert isinstance(read, TrtllmGenerationConfig)
    assert read.ranks_per_replica == 4


def test_it_requires_gpus():
    assert refused(config(), cluster=ClusterConfig()) == ["backend"]
    assert refused(config()) == []


def test_changes_require_a_receiver_that_keeps_what_came():
    assert refused(config(delta=True, weight_delivery="workers")) == ["delta"]
    assert refused(config(delta=True, weight_delivery="handles")) == []
    assert refused(config(weight_delivery="workers")) == []


@pytest.mark.parametrize(
    ("tensor", "expert", "sound"), [(None, None, True), (2, 4, True), (None, 8, True), (2, 2, False)]
)
def test_expert_sizes_multiply_to_the_tensor_parallel_size(tensor, expert, sound):
    sizes = config(tensor_parallel_size=8, moe_tensor_parallel_size=tensor, moe_expert_parallel_size=expert)
    assert (refused(sizes) == []) == sound


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({}, []),
        ({"pipeline_parallel_size": 2}, []),
        ({"on_update": "continue"}, ["prefix_caching"]),
        ({"on_update": "continue", "prefix_caching": False}, []),
        ({"on_update": "restart"}, []),
        ({"on_update": "restart", "pipeline_parallel_size": 2}, ["on_update"]),
    ],
)
def test_updates_in_flight_keep_versions_and_caches_apart(fields, wrong):
    assert refused(config(**fields)) == wrong


def test_arguments_that_follow_from_fields_are_not_given_twice():
    given = {"dtype": "float16", "cuda_graph_config": None}
    assert refused(config(trtllm_kwargs=given)) == ["trtllm_kwargs.dtype"]
    assert "trust_remote_code" not in TRTLLM_DERIVED_ARGUMENTS


@pytest.mark.parametrize(("kwargs", "wrong"), [({}, True), ({"enable_chunked_prefill": True}, False)])
def test_a_step_holds_a_whole_prompt_unless_it_is_cut(kwargs, wrong):
    policy = PolicyConfig(model_path="m", max_sequence_length=9000, micro_batch_tokens=9000)
    generation = config(max_num_tokens=8192, trtllm_kwargs=kwargs)
    assert refused(generation, policy) == ["max_num_tokens"] * wrong
