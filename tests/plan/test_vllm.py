"""What a vLLM engine cannot be started with, and what its processes hold."""

import math
from dataclasses import replace
from math import prod
from unittest import mock

import pytest

from nemorl.cluster.placement import worker_requests
from nemorl.config.experiment import Experiment
from nemorl.errors import ConfigError, Problem
from nemorl.generation.vllm_engine import plan
from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape, MoeShape
from nemorl.plan.machine import Machine
from nemorl.plan.memory import ProcessMemory, estimate_memory
from nemorl.plan.problems import plan_run
from tests.plan.conftest import Configure

VLLM = "generation.backend=vllm"
INT8 = "policy.quantization={format: int8}"
CHANNEL = "policy.quantization={format: fp8_channel}"
MEASURED = "{format: fp8, calibration: {}}"
INPUTS = "policy.quantization={format: int8, train: fake, activations: true}"
FAKE = "policy.quantization={format: int8, train: fake}"


# Of machines about which nothing is known here.
GPUS = "cluster.gpus_per_node=16"
SHARED = [
    "generation.colocated=true", "cluster.gpus_per_node=1", "policy.offload={weights: true, optimizer: true}"
]  # fmt: skip


def problems(configure: Configure, *overrides: str, version: str | None = "0.32") -> list[Problem]:
    experiment = configure(VLLM, *overrides)
    return vllm_problems(experiment, shape_of(experiment), version)


def vllm_problems(
    experiment: Experiment, shape: ModelShape, version: str | None = "0.32", multiplies_int8: bool = True
) -> list[Problem]:
    with (
        mock.patch.object(plan, "installed_version", return_value=version),
        mock.patch.object(plan, "_multiplies_int8", return_value=multiplies_int8),
    ):
        return list(plan.problems(experiment, shape, installed=True))


def shape_of(experiment: Experiment, head_dim: int = 32) -> ModelShape:
    """The tiny model's, whose own heads are of a size that vLLM's CPU kernels lack."""
    return replace(load_shape(experiment.policy.model_path), head_dim=head_dim)


def test_a_sound_engine_is_not_refused(configure: Configure) -> None:
    assert problems(configure, "generation.tensor_parallel_size=2") == []


def test_int8_is_refused_on_a_processor_that_has_wrong_products_of_it(configure: Configure) -> None:
    experiment = configure(VLLM, INT8)
    assert vllm_problems(experiment, shape_of(experiment)) == []
    (problem,) = vllm_problems(experiment, shape_of(experiment), multiplies_int8=False)
    assert (problem.field, problem.value) == ("policy.quantization.format", "int8")
    assert "has no VNNI" in problem.fix
    on_gpus = configure(VLLM, INT8, GPUS)
    assert vllm_problems(on_gpus, shape_of(on_gpus), multiplies_int8=False) == []


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("tensor_parallel_size=3", "it must divide the model's 8 attention heads: 1, 2, 4, 8 do"),
        ("pipeline_parallel_size=7", "the model has 6 layers, and each stage needs one: take no more"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(
    configure: Configure, override: str, fix: str
) -> None:
    (problem,) = problems(configure, f"generation.{override}", GPUS)
    assert problem.field == f"generation.{override.partition('=')[0]}"
    assert problem.fix == fix


def test_an_engine_that_is_not_installed_is_refused(configure: Configure) -> None:
    (problem,) = problems(configure, version=None)
    assert (problem.field, problem.value) == ("generation.backend", "vllm")
    assert "vLLM is not installed here" in problem.fix


def test_heads_that_the_kernels_of_a_cpu_lack_are_refused_there(configure: Configure) -> None:
    for overrides, refused in (((), ["policy.model_path"]), ((GPUS,), [])):
        experiment = configure(VLLM, *overrides)
        found = vllm_problems(experiment, shape_of(experiment, head_dim=24))
        assert [problem.field for problem in found] == refused


def test_adapters_next_to_experts_require_gpus(configure: Configure) -> None:
    for overrides, refused in (((), ["generation.adapters"]), ((GPUS,), [])):
        experiment = configure(
            VLLM, "generation.adapters=separate", "policy.lora={rank: 8, alpha: 16}", *overrides
        )
        mixture = replace(shape_of(experiment), moe=MoeShape(num_experts=4, top_k=2, ffn_hidden_size=8))
        found = vllm_problems(experiment, mixture)
        assert [problem.field for problem in found] == refused


def test_a_model_that_a_format_does_not_support_is_refused(configure: Configure) -> None:
    experiment = configure(VLLM, INT8)
    assert vllm_problems(experiment, shape_of(experiment)) == []
    experts = MoeShape(num_experts=4, top_k=2, ffn_hidden_size=8)
    mixture = replace(shape_of(experiment), family="qwen3_moe", moe=experts)
    narrow = replace(shape_of(experiment), ffn_hidden_size=320)
    for shape, overrides, fix in (
        (mixture, [INT8], "vLLM reads no experts in int8 on a CPU; add '*.experts.*' to ignore"),
        (mixture, [CHANNEL, GPUS], "vLLM reads no experts in fp8_channel; add '*.experts.*' to ignore, or"),
        (shape_of(experiment), [INT8, "policy.quantization.ignore=['*q_proj']"], "ignore all of them"),
        (narrow, [INT8.replace("int8", "int4"), GPUS], "requires a multiple of 128"),
    ):
        (problem,) = vllm_problems(configure(VLLM, *overrides), shape)
        assert (problem.field, fix in problem.fix) == ("policy.quantization.format", True)
    without = "policy.quantization.ignore=['*.experts.*']"
    for overrides in ([INT8, GPUS], [INT8, without], [CHANNEL, GPUS, without]):
        assert vllm_problems(configure(VLLM, *overrides), mixture) == []


def test_experts_in_one_tensor_are_reloaded(configure: Configure) -> None:
    for overrides, refused in (([], ["generation.update"]), (["generation.update=reload"], [])):
        experiment = configure(VLLM, *overrides)
        experts = MoeShape(num_experts=4, top_k=2, ffn_hidden_size=8)
        shape = replace(shape_of(experiment), sinks=True, moe=experts)
        assert [problem.field for problem in vllm_problems(experiment, shape)] == refused


def test_quantized_weights_take_less_memory(configure: Configure) -> None:
    experiment = configure(VLLM, INT8)
    shape = shape_of(experiment)
    sizes = {name: math.prod(size) for name, size in hf_tensors(shape).items()}
    linear = sum(size for name, size in sizes.items() if name.endswith("_proj.weight"))
    (generation,) = (part for part in estimate_memory(experiment, shape, True) if part.group == "generation")
    assert generation.weights == linear + 4 * (sum(sizes.values()) - linear)
    assert generation.staging_on_host == 0  # complete tensors pass through


def test_a_cache_must_hold_a_conversation(configure: Configure) -> None:
    experiment = configure(VLLM)
    long = experiment.policy.model_copy(update={"max_sequence_length": 10**9})
    changed = experiment.model_copy(update={"policy": long})
    found = vllm_problems(changed, shape_of(experiment))
    assert [problem.field for problem in found] == ["generation.kv_cache_gigabytes"]


@pytest.mark.parametrize(
    ("overrides", "field", "fix"),
    [
        (
            ["generation.vllm_kwargs={max_model_len: 5}"],
            "generation.vllm_kwargs.max_model_len",
            "this argument follows from other fields of the experiment (docs/vllm.md); remove it",
        ),
        (
            ["policy.quantization={format: fp8_channel}"],
            "policy.quantization.format",
            "on a CPU vLLM computes int8, and cluster.gpus_per_node is 0; set it to int8",
        ),
        (
            ["policy.quantization={format: nvfp4}", GPUS],
            "policy.quantization.calibration",
            "engines get the scales of activations that the policy measures; set it to {}, or format to",
        ),
        (
            [f"policy.quantization={MEASURED}"],
            "policy.quantization.format",
            "on a CPU vLLM computes int8, and cluster.gpus_per_node is 0; set it to int8",
        ),
        (
            [f"policy.quantization={MEASURED}", GPUS, "data.train={name: seeds}"],
            "policy.quantization.format",
            "measured on prompts of data.train, whose tasks have no text; use fp8_channel",
        ),
        (
            ["policy.quantization={format: int8, activations: true}"],
            "policy.quantization.activations",
            "train is none, so the policy rounds nothing; set train to fake, or remove this",
        ),
        (
            [
                "policy.quantization={format: nvfp4_w4a16, train: fake, activations: true}",
                GPUS,
                "policy.kernels=local",
            ],
            "policy.quantization.activations",
            "nvfp4_w4a16 leaves activations as they are; remove it",
        ),
        (
            [INPUTS, "policy.lora={rank: 8, alpha: 16}"],
            "policy.quantization.activations",
            "engines would round adapters with the weights that they are merged into; remove it, or policy",
        ),
        ([INPUTS, "generation.backend=torch"], "policy.quantization.format", "or activations to false"),
        (
            [FAKE, "policy.lora={rank: 8, alpha: 16}", "generation.adapters=separate"],
            "policy.quantization.train",
            "so engines keep weights that are not rounded; set generation.adapters to merged",
        ),
        ([FAKE, GPUS], "policy.quantization.train", "set policy.kernels to local"),
        (
            ["policy.quantization={format: int8, calibration: {prompts: 8}}"],
            "policy.quantization.calibration",
            "int8 stores no scales of activations; remove it",
        ),
        (
            [INT8, "generation.backend=torch"],
            "policy.quantization.format",
            "does not compute with quantized weights; set generation.backend to vllm, or train to fake",
        ),
        (
            [INT8, "generation.quantization=fp8", GPUS],
            "generation.quantization",
            "with policy.quantization engines quantize weights in its format; remove this",
        ),
        (
            [INT8, "generation.update=staged"],
            "generation.update",
            "with policy.quantization engines load weights by vLLM's loader; set it to reload",
        ),
        (
            [INT8, "generation.adapters=separate", "policy.lora={rank: 8, alpha: 16}"],
            "generation.adapters",
            "with policy.quantization engines receive complete weights and quantize these; set it to merged",
        ),
        (
            [INT8, "generation.vllm_kwargs={load_format: dummy}"],
            "generation.vllm_kwargs.load_format",
            "with policy.quantization engines are started with their own; remove it",
        ),
        (
            ["generation.kv_cache_dtype=fp8"],
            "generation.kv_cache_dtype",
            "it requires GPUs, and cluster.gpus_per_node is 0; set it to auto",
        ),
        (
            ["policy.fp8={}", GPUS, "policy.kernels=local"],
            "policy.fp8",
            "policy.kernels is local, and only Transformer Engine's layers compute in FP8; remove it",
        ),
        (
            ["generation.quantization=fp8"],
            "generation.quantization",
            "quantizing while loading requires GPUs, and cluster.gpus_per_node is 0; remove it",
        ),
        (
            ["generation.quantization=fp8", "generation.update=staged", "cluster.gpus_per_node=8"],
            "generation.update",
            "set it to reload",
        ),
        (
            [*SHARED, "policy.offload.optimizer=false"],
            "policy.offload.optimizer",
            "generation.colocated is true, and engines need the memory that this occupies; remove it",
        ),
        (
            [*SHARED, "generation.replicas=2"],
            "generation.replicas",
            "with generation.colocated, engines of 1 GPU share those of 1 policy process",
        ),
        (
            [*SHARED, "generation.tensor_parallel_size=8"],
            "generation.replicas",
            "an engine of 8 GPUs cannot share those of 1 policy process",
        ),
        (
            [*SHARED, "generation.transport=nccl"],
            "generation.transport",
            "with generation.colocated two processes share a GPU, which NCCL refuses; set this to auto",
        ),
        (
            ["generation.tensor_parallel_size=8", "cluster.gpus_per_node=8"],
            "cluster.gpus_per_node",
            "8 GPUs are too few for 1 policy process and 8 engines",
        ),
        (
            ["generation.pipeline_parallel_size=2"],
            "generation.pipeline_parallel_size",
            "vLLM's pipeline stages fail on a CPU",
        ),
        (
            ["generation.max_num_batched_tokens=8"],
            "generation.max_num_batched_tokens",
            "on a CPU a step reads a prompt; set it to at least policy.max_sequence_length, 64",
        ),
        (
            ["generation.vllm_kwargs={speculative_config: {method: ngram}}"],
            "generation.vllm_kwargs.speculative_config",
            "on a CPU the logprobs of vLLM 0.32 are wrong with drafts",
        ),
        (["generation.max_batch_size=8"], "generation.max_batch_size", "belongs to `torch`"),
        (["generation.adapters=separate"], "generation.adapters", "policy.lora is null"),
        (
            ["generation.adapters=separate", "policy.lora={rank: 513, alpha: 1}"],
            "policy.lora.rank",
            "the engine takes at most 512; lower it, or set generation.adapters to merged",
        ),
        (
            ["generation.adapters=separate", "policy.lora={rank: 8, alpha: 1}", "generation.update=in_place"],
            "generation.update",
            "with generation.adapters: separate, adapters are loaded as a second copy; remove it",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(
    configure: Configure, overrides: list[str], field: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        configure(VLLM, *overrides)
    (problem,) = refused.value.problems
    assert problem.field == field
    assert fix in problem.fix


def test_each_rank_of_an_engine_has_a_gpu(configure: Configure) -> None:
    experiment = configure(
        VLLM, "generation.tensor_parallel_size=2", "generation.replicas=2", "cluster.gpus_per_node=8"
    )
    (engines,) = (request for request in worker_requests(experiment) if request.group == "generation")
    assert (engines.count, engines.gpus) == (2, 2)


def test_memory_is_counted_by_rank_and_by_the_way_weights_come(configure: Configure) -> None:
    def process(*overrides: str) -> ProcessMemory:
        experiment = configure(VLLM, "generation.tensor_parallel_size=2", *overrides)
        shape = load_shape(experiment.policy.model_path)
        (engines,) = (p for p in estimate_memory(experiment, shape, True) if p.group == "generation")
        return engines

    def rank(*overrides: str) -> tuple[int, int, int, int]:
        engines = process(*overrides)
        return engines.count, engines.weights, engines.staging, engines.kv_cache

    count, weights, staging, cache = rank()
    buckets = 2 * weights  # which are less than `bucket_megabytes`
    assert (count, staging, cache) == (2, weights + buckets, 2**30)
    experiment = configure(VLLM)
    shape = load_shape(experiment.policy.model_path)
    # On a CPU all matrices but the untied embedding are packed too.
    packed = weights - 4 * shape.vocab_size * shape.hidden_size // 2
    assert rank("generation.update=in_place")[2] == packed + buckets
    assert rank("generation.update=in_place", "generation.bucket_megabytes=1")[2] == packed + 2 * 2**20
    on_gpus = "cluster.gpus_per_node=4"
    assert rank("generation.update=in_place", on_gpus)[2] == buckets
    assert rank("generation.update=staged", on_gpus)[2] == weights + buckets
    reloading = process("generation.update=reload", on_gpus)
    # Neither the GPU nor the host holds the whole model, but a layer twice.
    largest = max(
        sum(prod(size) for name, size in hf_tensors(shape).items() if name.startswith(part))
        for part in ("model.embed_tokens", "model.layers.0.", "model.layers.1.")
    )
    assert reloading.staging_on_host == 0
    assert reloading.staging == 2 * 2 * weights + 2 * 4 * largest
    assert reloading.on_device == reloading.total


@pytest.mark.parametrize(
    "overrides",
    [
        [f"policy.quantization={MEASURED}", GPUS],
        ["policy.quantization={format: nvfp4, train: fake, activations: true, calibration: {}}", GPUS,
         "policy.kernels=local"],
        ["policy.quantization={format: fp8, train: fake, activations: true, calibration: {}}",
         "generation.backend=megatron"],
        [INPUTS, "generation.backend=megatron"],
    ],
)  # fmt: skip
def test_samples_by_stored_scales_of_activations(configure: Configure, overrides: list[str]) -> None:
    configure(VLLM, *overrides)


def test_engines_without_a_policy_have_no_scales_of_activations(configure: Configure) -> None:
    for quantization, refused in ((MEASURED, True), ("{format: fp8_channel}", False)):
        experiment = configure(VLLM, GPUS, f"policy.quantization={quantization}")
        machine = Machine(cores=8, memory_bytes=10**11, shared_memory_bytes=10**10, gpus=())
        found = plan_run(experiment, machine, training=False).problems
        found = [problem for problem in found if "scales of activations" in problem.fix]
        assert [p.field for p in found] == ["policy.quantization.format"] * refused


def test_rounded_weights_take_memory_while_the_policy_samples(configure: Configure) -> None:
    staging = []
    for overrides in ([], [FAKE]):
        experiment = configure("generation={backend: megatron}", *overrides)
        (policy,) = (
            p
            for p in estimate_memory(experiment, load_shape(experiment.policy.model_path), True)
            if p.group == "policy"
        )
        staging.append(policy.staging)
    assert staging[1] - staging[0] == policy.weights
