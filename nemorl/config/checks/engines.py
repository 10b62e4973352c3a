"""What vLLM cannot do, and what it would do wrong.

What TensorRT-LLM cannot do, and what it would do wrong.

What the policy has to be like to sample by itself.

Servers that somebody else runs, and our own endpoint.
"""

import re
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from nemorl.config.algorithm import AlgorithmConfig, OnlineBase
from nemorl.config.auxiliary import (
    CriticConfig,
    EndpointTeacherConfig,
    ModelGroupConfig,
    ReferenceConfig,
    TeacherConfig,
    teachers_held,
)
from nemorl.config.environment import LocalModelRewardConfig, RewardConfig, ServiceRewardBase
from nemorl.config.facts import generates
from nemorl.config.generation import (
    ADAPTER_RANKS,
    GenerationBase,
    GenerationConfig,
    MegatronGenerationConfig,
    OpenAIGenerationConfig,
    TrtllmGenerationConfig,
    VllmGenerationConfig,
    is_loopback,
)
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Problem

# Arguments of AsyncEngineArgs that follow from other fields.
VLLM_OWN_ARGUMENTS = frozenset(
    {
        *("model", "tokenizer", "skip_tokenizer_init", "dtype", "max_model_len", "max_num_seqs"),
        *("max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size", "quantization"),
        *("distributed_executor_backend", "gpu_memory_utilization", "kv_cache_memory_bytes"),
        *("enforce_eager", "enable_prefix_caching", "logprobs_mode", "worker_extension_cls"),
        *("data_parallel_size", "enable_sleep_mode", "enable_chunked_prefill"),
        *("enable_return_routed_experts", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"),
        *("lora_dtype", "lora_target_modules"),
    }
)


def vllm_arguments_are_free(generation: GenerationConfig) -> Iterator[Problem]:
    """What a field of ours decides is not given twice."""
    if isinstance(generation, VllmGenerationConfig):
        for name in sorted(VLLM_OWN_ARGUMENTS & generation.vllm_kwargs.keys()):
            fix = "this follows from other fields of the experiment (docs/vllm.md): leave it out"
            yield Problem(f"generation.vllm_kwargs.{name}", generation.vllm_kwargs[name], fix)


def vllm_stages_want_gpus(generation: GenerationConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """On a CPU the second stage of vLLM 0.32 fails at its first token."""
    if not isinstance(generation, VllmGenerationConfig) or cluster.gpus_per_node:
        return
    if generation.pipeline_parallel_size > 1:
        fix = "vLLM's pipeline stages fail on a CPU: set it to 1, and use tensor_parallel_size"
        yield Problem("generation.pipeline_parallel_size", generation.pipeline_parallel_size, fix)


def vllm_reads_prompts_whole(
    generation: GenerationConfig, policy: PolicyConfig, cluster: ClusterConfig
) -> Iterator[Problem]:
    """On a CPU vLLM cannot read a prompt in parts for a request that has a seed, as all of ours have."""
    if not isinstance(generation, VllmGenerationConfig) or cluster.gpus_per_node:
        return
    tokens, length = generation.max_num_batched_tokens, policy.max_sequence_length
    if tokens is not None and tokens < length:
        fix = f"on a CPU prompts are read whole: give it policy.max_sequence_length, {length}, or more"
        yield Problem("generation.max_num_batched_tokens", tokens, fix)


def vllm_quantises_by_reload(generation: GenerationConfig) -> Iterator[Problem]:
    """Quantised weights are made by the loader, from whole tensors."""
    if not isinstance(generation, VllmGenerationConfig) or generation.quantization is None:
        return
    if generation.update not in ("auto", "reload") and generation.adapters == "merged":
        fix = "generation.quantization is set, and vLLM's loader makes such weights: set it to reload"
        yield Problem("generation.update", generation.update, fix)


def vllm_computes_adapters(generation: GenerationConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """Adapters come alone where there are any, beside weights that stay."""
    if not isinstance(generation, VllmGenerationConfig) or generation.adapters == "merged":
        return
    if policy.lora is None:
        fix = "policy.lora is null, and whole weights are trained: set it to merged, or train adapters"
        yield Problem("generation.adapters", generation.adapters, fix)
    elif policy.lora.rank > ADAPTER_RANKS[-1]:
        fix = f"vLLM takes at most {ADAPTER_RANKS[-1]}: lower it, or set generation.adapters to merged"
        yield Problem("policy.lora.rank", policy.lora.rank, fix)
    if generation.update not in ("auto", "staged"):
        fix = "with generation.adapters separate, adapters arrive beside those in use: leave it out"
        yield Problem("generation.update", generation.update, fix)


def vllm_takes_turns(generation: GenerationConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Engines sleep while the policy trains."""
    if not isinstance(generation, VllmGenerationConfig) or not generation.colocated:
        return
    if isinstance(algorithm, OnlineBase) and algorithm.max_staleness:
        fix = "with algorithm.max_staleness engines sample while the policy trains: set it to false"
        yield Problem("generation.colocated", True, fix)


def vllm_shares_gpus(
    generation: GenerationConfig,
    cluster: ClusterConfig,
    policy: PolicyConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
    algorithm: AlgorithmConfig,
) -> Iterator[Problem]:
    """Engines find the memory of the policy's GPUs free, and enough of these."""
    if not isinstance(generation, VllmGenerationConfig) or not generation.colocated:
        return
    if not (cluster.gpus_per_node and generates(algorithm)):
        return
    stay = {
        **{f"policy.offload.{field}": getattr(policy.offload, field) for field in ("weights", "optimizer")},
        **_offloads("critic", critic, ("weights", "optimizer")),
        **_offloads("reference", reference, ("weights",)),
    }
    for name, teacher in teachers_held(teachers).items():
        stay |= _offloads(f"teachers.{name}", teacher, ("weights",))
    for place, reward in enumerate(rewards):
        if isinstance(reward, LocalModelRewardConfig):
            stay |= _offloads(f"rewards.{place}", reward, ("weights",))
    for field, leaves in stay.items():
        if not leaves:
            fix = "generation.colocated is true, and engines need the memory that this takes: set it to true"
            yield Problem(field, False, fix)
    ranks, there = generation.ranks_per_replica, policy.layout.world_size
    if generation.replicas * ranks > there:
        fix = (
            f"with generation.colocated, engines of {ranks} GPU{'s' * (ranks > 1)} share those of the "
            f"{there} policy processes: take no more than {there // ranks}"
            if ranks <= there
            else f"an engine of {ranks} GPUs cannot share those of the {there} policy processes: lower "
            "generation.tensor_parallel_size or pipeline_parallel_size, or set generation.colocated to false"
        )
        yield Problem("generation.replicas", generation.replicas, fix)
    if generation.transport == "nccl":
        fix = "NCCL connects no two processes of one GPU, as generation.colocated has them: set this to auto"
        yield Problem("generation.transport", "nccl", fix)


def _offloads(name: str, model: ModelGroupConfig | None, parts: Iterable[str]) -> dict[str, bool]:
    """What of a model on the policy's devices leaves them, by field."""
    if model is None or model.devices != "policy":
        return {}
    return {f"{name}.offload.{part}": getattr(model.offload, part) for part in parts}


def vllm_quantises_on_gpus(generation: GenerationConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """Its methods that quantise while loading want CUDA."""
    if not isinstance(generation, VllmGenerationConfig) or generation.quantization is None:
        return
    if cluster.gpus_per_node == 0:
        fix = "quantising while loading wants GPUs, and cluster.gpus_per_node is 0: leave it out"
        yield Problem("generation.quantization", generation.quantization, fix)


# Arguments of AsyncLLM that follow from other fields.
TRTLLM_OWN_ARGUMENTS = frozenset(
    {
        *(
            "model",
            "backend",
            "dtype",
            "orchestrator_type",
            "ray_worker_extension_cls",
            "skip_tokenizer_init",
        ),
        *("tensor_parallel_size", "pipeline_parallel_size", "moe_tensor_parallel_size"),
        *("moe_expert_parallel_size", "max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len"),
        *("kv_cache_config", "sleep_config", "placement_groups", "placement_bundle_indices"),
        *("per_worker_gpu_share", "disable_overlap_scheduler"),
    }
)


def trtllm_wants_gpus(cluster: ClusterConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """It has no CPU path."""
    if isinstance(generation, TrtllmGenerationConfig) and cluster.gpus_per_node == 0:
        fix = "TensorRT-LLM computes on GPUs only, and cluster.gpus_per_node is 0: take torch or vllm"
        yield Problem("generation.backend", generation.backend, fix)


def trtllm_step_holds_prompt(policy: PolicyConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """A prompt is computed in one step, unless the engine may cut it."""
    if not isinstance(generation, TrtllmGenerationConfig):
        return
    length = policy.max_sequence_length
    if generation.max_num_tokens < length and not generation.trtllm_kwargs.get("enable_chunked_prefill"):
        yield Problem(
            "generation.max_num_tokens",
            generation.max_num_tokens,
            f"a step must hold a whole prompt: give it policy.max_sequence_length, {length}, or "
            "trtllm_kwargs.enable_chunked_prefill=true",
        )


def trtllm_experts_fit(generation: GenerationConfig) -> Iterator[Problem]:
    """A mixture's own sizes split the tensor-parallel group."""
    if not isinstance(generation, TrtllmGenerationConfig):
        return
    tensor, expert = generation.moe_tensor_parallel_size, generation.moe_expert_parallel_size
    if tensor is None and expert is None:
        return
    if (tensor or 1) * (expert or 1) != generation.tensor_parallel_size:
        yield Problem(
            "generation.moe_expert_parallel_size",
            expert,
            f"times moe_tensor_parallel_size ({tensor or 1}) it must be tensor_parallel_size "
            f"({generation.tensor_parallel_size})",
        )


def trtllm_updates_in_flight(generation: GenerationConfig) -> Iterator[Problem]:
    """Every token must carry the version that sampled it, and no cache may outlive its weights."""
    if not isinstance(generation, TrtllmGenerationConfig):
        return
    if not generation.in_flight_updates:
        if generation.recompute_kv_cache:
            fix = "nothing is in flight at an update: set it to false, or in_flight_updates to true"
            yield Problem("generation.recompute_kv_cache", True, fix)
        return
    if generation.pipeline_parallel_size > 1:
        fix = "stages hold micro-batches between two steps, whose tokens have no one version: set it to false"
        yield Problem("generation.in_flight_updates", True, fix)
    if generation.prefix_caching and not generation.recompute_kv_cache:
        fix = (
            "sequences that end after an update leave cache of the old weights for others to reuse: set "
            "it to false, or recompute_kv_cache to true"
        )
        yield Problem("generation.prefix_caching", True, fix)


def trtllm_arguments_are_free(generation: GenerationConfig) -> Iterator[Problem]:
    """What a field of ours decides is not given twice."""
    if isinstance(generation, TrtllmGenerationConfig):
        for name in sorted(TRTLLM_OWN_ARGUMENTS & generation.trtllm_kwargs.keys()):
            fix = "this follows from other fields of the experiment (docs/trtllm.md): leave it out"
            yield Problem(f"generation.trtllm_kwargs.{name}", generation.trtllm_kwargs[name], fix)


_OR = "or take another generation.backend"


def policy_can_sample(policy: PolicyConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """Layouts that decode, and weights that are there when it does."""
    if not isinstance(generation, MegatronGenerationConfig):
        return
    layout, field = policy.layout, "policy.layout"
    if layout.context_parallel_size > 1:
        fix = f"generation.backend megatron decodes whole sequences on each process: set it to 1, {_OR}"
        yield Problem(f"{field}.context_parallel_size", layout.context_parallel_size, fix)
    if layout.virtual_pipeline_parallel_size > 1:
        fix = f"generation.backend megatron decodes with one run of layers a stage: set it to 1, {_OR}"
        yield Problem(f"{field}.virtual_pipeline_parallel_size", layout.virtual_pipeline_parallel_size, fix)
    if policy.offload.weights:
        fix = f"generation.backend is megatron, which samples with these weights: set it to false, {_OR}"
        yield Problem("policy.offload.weights", True, fix)


def policy_samples_as_it_is(policy: PolicyConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """Settings of engines, which there are none of, would do nothing."""
    if not isinstance(generation, MegatronGenerationConfig):
        return
    instead = {
        "replicas": "it has as many copies as policy.layout.data_parallel_size says",
        "precision": "it computes in policy.precision",
        "bucket_megabytes": "no weights travel",
        "transport": "no weights travel",
        "delta": "no weights travel",
        "check_one_in": "no weights travel",
        "threads": "its processes have cluster.policy_threads",
        "endpoint": "between two stages of sampling it answers nobody",
    }
    for name, why in instead.items():
        value = getattr(generation, name)
        if value != GenerationBase.model_fields[name].default:
            yield Problem(
                f"generation.{name}", value, f"the policy samples by itself, and {why}: remove this"
            )


def samples_can_be_learnt(algorithm: AlgorithmConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """What is learnt are tokens, with the logprobs at which they were sampled."""
    if not isinstance(generation, OpenAIGenerationConfig) or generation.token_ids:
        return
    if algorithm.online:
        fix = (
            "samples that come as text alone cannot be learnt from: take a server that returns token ids and "
            "logprobs (vLLM's, `nemorl serve`) and set it to true, or use this one with `nemorl eval`"
        )
        yield Problem("generation.token_ids", False, fix)


def servers_are_used_as_they_are(generation: GenerationConfig) -> Iterator[Problem]:
    """What speaks of an engine's weights, or of what text cannot carry, would do nothing."""
    if not isinstance(generation, OpenAIGenerationConfig):
        return
    ignored = dict.fromkeys(
        ("precision", "bucket_megabytes", "transport", "delta", "check_one_in"),
        "the server has weights of its own, and gets none",
    )
    if not generation.token_ids:
        ignored["stop_token_ids"] = "with generation.token_ids: false text alone goes to the server"
    for name, why in ignored.items():
        value = getattr(generation, name)
        if value != GenerationBase.model_fields[name].default:
            yield Problem(f"generation.{name}", value, f"{why}: remove this")


def server_address_is_whole(generation: GenerationConfig) -> Iterator[Problem]:
    """Requests go to paths below it."""
    if not isinstance(generation, OpenAIGenerationConfig):
        return
    url, fix = generation.base_url, None
    whole = url.startswith(("http://", "https://")) and generation.host and not re.search(r"\s", url)
    if not whole:
        fix = "an address such as http://127.0.0.1:8000/v1 is wanted"
    elif not urlsplit(url).path.strip("/"):
        fix = (
            f"requests would go to {url.rstrip('/')}/completions, which servers do not know: end it with /v1"
        )
    elif url.rstrip("/").endswith("/completions"):
        fix = "/completions is added to it with each request: let it end with /v1"
    if fix is not None:
        yield Problem("generation.base_url", url, fix)


def servers_are_reached_from_all_nodes(
    cluster: ClusterConfig,
    generation: GenerationConfig,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Problem]:
    """Workers ask them, and on another node a loopback address is another machine's."""
    if cluster.num_nodes == 1:
        return
    asked: dict[str, str] = {}
    if isinstance(generation, OpenAIGenerationConfig):
        asked["generation.base_url"] = generation.base_url
    for name, teacher in teachers.items():
        if isinstance(teacher, EndpointTeacherConfig):
            asked[f"teachers.{name}.base_url"] = teacher.base_url
    for place, reward in enumerate(rewards):
        if isinstance(reward, ServiceRewardBase):
            asked[f"rewards.{place}.url"] = reward.url
    for field, url in asked.items():
        if is_loopback(_host(url)):
            fix = (
                f"cluster.num_nodes is {cluster.num_nodes}, and on each of them this address is another "
                "machine: name the one by which all reach the server"
            )
            yield Problem(field, url, fix)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def endpoint_has_a_key(generation: GenerationConfig) -> Iterator[Problem]:
    """Who is reached from other machines does not make up the key."""
    endpoint = generation.endpoint
    if endpoint is not None and not endpoint.on_this_machine_only and endpoint.api_key_env is None:
        fix = (
            "other machines reach this address, so the key must be yours: name its environment variable in "
            "generation.endpoint.api_key_env, or listen on 127.0.0.1"
        )
        yield Problem("generation.endpoint.host", endpoint.host, fix)
