"""Our settings as vLLM's."""

from pathlib import Path
from typing import Any

import pytest

from nemorl.config.generation import VllmGenerationConfig
from nemorl.config.policy import LoraConfig, PolicyConfig
from nemorl.config.quantization import QuantizationConfig
from nemorl.generation.types import EngineOptions
from nemorl.generation.vllm_engine.arguments import (
    LEARNED_LAYOUT,
    ONE_PROCESS,
    QUANTIZATION,
    TRAINED_DRAFTS,
    engine_arguments,
    environment,
    sampling_arguments,
)
from tests.generation.examples import Prompts, request


def config(**fields: Any) -> VllmGenerationConfig:
    return VllmGenerationConfig(backend="vllm", **fields)


def arguments(device: Any, **fields: Any) -> dict[str, Any]:
    return engine_arguments(config(**fields), EngineOptions(Path("m"), Path("m"), 64, device=device))


def started(config: VllmGenerationConfig, device: Any, threads: int | None = None) -> dict[str, str]:
    options = EngineOptions(Path("m"), Path("m"), 64, device=device, threads=threads)
    return environment(config, options, Path("s"))


def test_further_arguments_are_passed_on() -> None:
    assert arguments("cpu", vllm_kwargs={"seed": 3})["seed"] == 3


def test_drafts_are_those_of_speculation() -> None:
    def drafts(**section: Any) -> dict[str, Any]:
        given: dict[str, Any] = arguments("cuda", tensor_parallel_size=2, speculation=section)
        described: dict[str, Any] = given["speculative_config"]
        return described

    assert drafts(method="prompt_lookup", max_tokens=5, max_match=3) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
    assert drafts(method="draft_model", model_path="/small", max_tokens=3) == {
        "method": "draft_model",
        "model": "/small",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 2,
    }
    assert drafts(method="eagle3", model_path="/head") == {
        "method": "eagle3",
        "model": "/head",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 2,
    }
    assert drafts(method="mtp") == {"method": "mtp", "num_speculative_tokens": 1}
    assert "speculative_config" not in arguments("cuda")


@pytest.mark.parametrize(
    ("method", "trains", "told"),
    [("mtp", True, "1"), ("mtp", False, None), ("prompt_lookup", True, None)],
)
def test_updates_bring_drafts_of_layers_that_the_policy_trains(
    method: str, trains: bool, told: str | None
) -> None:
    policy = PolicyConfig(model_path=Path("m"), multi_token_prediction={} if trains else None)
    drafting = config(speculation={"method": method})
    trained = drafting.host_options(policy)["trained_drafts"]
    options = EngineOptions(Path("m"), Path("m"), 64, device="cuda")
    variables = environment(drafting, options, Path("s"), trained_drafts=bool(trained))
    assert variables.get(TRAINED_DRAFTS) == told


def test_a_cpu_has_a_cache_of_its_own_size_and_a_gpu_a_share() -> None:
    on_cpu, on_gpu = arguments("cpu", kv_cache_gigabytes=2), arguments("cuda", gpu_memory_utilization=0.5)
    assert (on_cpu["kv_cache_memory_bytes"], on_cpu["enforce_eager"]) == (2 * 2**30, True)
    assert (on_gpu["gpu_memory_utilization"], on_gpu["enforce_eager"]) == (0.5, False)
    assert "kv_cache_memory_bytes" not in on_gpu
    assert (on_gpu["kv_cache_dtype"], arguments("cuda", kv_cache_dtype="fp8")["kv_cache_dtype"]) == (
        "auto",
        "fp8",
    )


def test_experts_are_returned_where_they_are_replayed() -> None:
    on_gpus = EngineOptions(Path("m"), Path("m"), 64, device="cuda")
    told = engine_arguments(config(), on_gpus, return_experts=True)
    assert told["enable_return_routed_experts"]
    assert "enable_return_routed_experts" not in arguments("cuda")


def test_a_cpu_reads_prompts_whole() -> None:
    long = engine_arguments(config(), EngineOptions(Path("m"), Path("m"), 5000))
    assert (long["enable_chunked_prefill"], long["max_num_batched_tokens"]) == (False, 5000)
    assert "enable_chunked_prefill" not in arguments("cuda")


def test_ranks_divide_the_threads_of_a_replica() -> None:
    assert started(config(tensor_parallel_size=2), device="cpu", threads=4)["OMP_NUM_THREADS"] == "2"


def test_only_on_a_cpu_a_variable_keeps_a_single_worker_in_the_process_of_its_engine() -> None:
    assert started(config(), device="cpu")[ONE_PROCESS] == "0"
    assert ONE_PROCESS not in started(config(tensor_parallel_size=2), device="cpu")
    assert ONE_PROCESS not in started(config(), device="cuda")


def test_workers_learn_the_layout_on_every_device_where_shards_are_written() -> None:
    for device in ("cpu", "cuda"):
        for fields, learn in (({}, True), ({"update": "reload"}, False), ({"adapters": "separate"}, False)):
            assert (LEARNED_LAYOUT in started(config(**fields), device=device)) is learn


def test_adapters_have_room_of_a_size_that_vllm_takes() -> None:
    told = engine_arguments(
        config(adapters="separate"),
        EngineOptions(Path("m"), Path("m"), 64),
        lora=LoraConfig(rank=9, alpha=1.0),
        projections=["q_proj"],
    )
    assert (told["max_lora_rank"], told["lora_target_modules"]) == (16, ["q_proj"])
    assert config(adapters="separate").update_on("cuda") == "staged"


def test_auto_is_staged_on_a_cpu_in_place_on_a_gpu_and_reload_where_weights_are_quantized() -> None:
    assert config().update_on("cpu") == "staged"
    assert config().update_on("cuda") == "in_place"
    assert config(quantization="fp8").update_on("cuda") == "reload"


def test_quantized_weights_are_loaded_again_and_may_be_packed() -> None:
    int8 = QuantizationConfig(format="int8")
    assert config().update_on("cpu", quantizes=True) == "reload"
    variables = environment(config(), EngineOptions(Path("m"), Path("m"), 64), Path("s"), int8)
    assert LEARNED_LAYOUT not in variables
    assert QuantizationConfig.model_validate_json(variables[QUANTIZATION]) == int8
    described = {"quant_method": "compressed-tensors"}
    given = engine_arguments(config(), EngineOptions(Path("m"), Path("m"), 64), quantization_config=described)
    assert given["hf_overrides"] == {"quantization_config": described}


def test_a_turn_ends_where_the_sequence_is_full() -> None:
    asked = request(Prompts().one(60), max_new_tokens=30)
    assert sampling_arguments(asked, 64)["max_tokens"] == 4


def test_what_continues_elsewhere_draws_other_numbers() -> None:
    first = sampling_arguments(request(Prompts().one(6), seed=5), 64)["seed"]
    later = sampling_arguments(request(Prompts().one(6), seed=5, sampled_before=2), 64)["seed"]
    assert (first, later == first, 0 <= later < 2**63) == (5, False, True)
