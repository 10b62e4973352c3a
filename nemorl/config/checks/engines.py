"""What vLLM cannot do, and what it would do wrong."""

from collections.abc import Iterable, Iterator

from nemorl.config.algorithm import AlgorithmConfig, OnlineBase
from nemorl.config.auxiliary import (
    CriticConfig,
    ModelGroupConfig,
    ReferenceConfig,
    TeacherConfig,
    teachers_held,
)
from nemorl.config.environment import LocalModelRewardConfig, RewardConfig
from nemorl.config.generation import GenerationConfig
from nemorl.config.generation_vllm import ADAPTER_RANKS, VllmGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Violation

from .facts import generates

# Arguments of AsyncEngineArgs that follow from other fields.
OWN_ARGUMENTS = frozenset(
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


def vllm_arguments_are_free(generation: GenerationConfig) -> Iterator[Violation]:
    """What a field of ours decides is not given twice."""
    if isinstance(generation, VllmGenerationConfig):
        for name in sorted(OWN_ARGUMENTS & generation.vllm_kwargs.keys()):
            mend = "this follows from other fields of the experiment (docs/vllm.md): leave it out"
            yield Violation(f"generation.vllm_kwargs.{name}", generation.vllm_kwargs[name], mend)


def vllm_stages_want_gpus(generation: GenerationConfig, cluster: ClusterConfig) -> Iterator[Violation]:
    """On a CPU the second stage of vLLM 0.32 fails at its first token."""
    if not isinstance(generation, VllmGenerationConfig) or cluster.gpus_per_node:
        return
    if generation.pipeline_parallel_size > 1:
        mend = "vLLM's pipeline stages fail on a CPU: set it to 1, and use tensor_parallel_size"
        yield Violation("generation.pipeline_parallel_size", generation.pipeline_parallel_size, mend)


def vllm_reads_prompts_whole(
    generation: GenerationConfig, policy: PolicyConfig, cluster: ClusterConfig
) -> Iterator[Violation]:
    """On a CPU vLLM cannot read a prompt in parts for a request that has a seed, as all of ours have."""
    if not isinstance(generation, VllmGenerationConfig) or cluster.gpus_per_node:
        return
    tokens, length = generation.max_num_batched_tokens, policy.max_sequence_length
    if tokens is not None and tokens < length:
        mend = f"on a CPU prompts are read whole: give it policy.max_sequence_length, {length}, or more"
        yield Violation("generation.max_num_batched_tokens", tokens, mend)


def vllm_quantises_by_reload(generation: GenerationConfig) -> Iterator[Violation]:
    """Quantised weights are made by the loader, from whole tensors."""
    if not isinstance(generation, VllmGenerationConfig) or generation.quantization is None:
        return
    if generation.update not in ("auto", "reload") and generation.adapters == "merged":
        mend = "generation.quantization is set, and vLLM's loader makes such weights: set it to reload"
        yield Violation("generation.update", generation.update, mend)


def vllm_computes_adapters(generation: GenerationConfig, policy: PolicyConfig) -> Iterator[Violation]:
    """Adapters come alone where there are any, beside weights that stay."""
    if not isinstance(generation, VllmGenerationConfig) or generation.adapters == "merged":
        return
    if policy.lora is None:
        mend = "policy.lora is null, and whole weights are trained: set it to merged, or train adapters"
        yield Violation("generation.adapters", generation.adapters, mend)
    elif policy.lora.rank > ADAPTER_RANKS[-1]:
        mend = f"vLLM takes at most {ADAPTER_RANKS[-1]}: lower it, or set generation.adapters to merged"
        yield Violation("policy.lora.rank", policy.lora.rank, mend)
    if generation.update not in ("auto", "staged"):
        mend = "with generation.adapters separate, adapters arrive beside those in use: leave it out"
        yield Violation("generation.update", generation.update, mend)


def vllm_takes_turns(generation: GenerationConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Engines sleep while the policy trains."""
    if not isinstance(generation, VllmGenerationConfig) or not generation.colocated:
        return
    if isinstance(algorithm, OnlineBase) and algorithm.max_staleness:
        mend = "with algorithm.max_staleness engines sample while the policy trains: set it to false"
        yield Violation("generation.colocated", True, mend)


def vllm_shares_gpus(
    generation: GenerationConfig,
    cluster: ClusterConfig,
    policy: PolicyConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
    algorithm: AlgorithmConfig,
) -> Iterator[Violation]:
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
            mend = "generation.colocated is true, and engines need the memory that this takes: set it to true"
            yield Violation(field, False, mend)
    ranks, there = generation.ranks_per_replica, policy.layout.world_size
    if generation.replicas * ranks > there:
        mend = (
            f"with generation.colocated, engines of {ranks} GPU{'s' * (ranks > 1)} share those of the "
            f"{there} policy processes: take no more than {there // ranks}"
            if ranks <= there
            else f"an engine of {ranks} GPUs cannot share those of the {there} policy processes: lower "
            "generation.tensor_parallel_size or pipeline_parallel_size, or set generation.colocated to false"
        )
        yield Violation("generation.replicas", generation.replicas, mend)
    if generation.transport == "nccl":
        mend = "NCCL connects no two processes of one GPU, as generation.colocated has them: set this to auto"
        yield Violation("generation.transport", "nccl", mend)


def _offloads(name: str, model: ModelGroupConfig | None, parts: Iterable[str]) -> dict[str, bool]:
    """What of a model on the policy's devices leaves them, by field."""
    if model is None or model.devices != "policy":
        return {}
    return {f"{name}.offload.{part}": getattr(model.offload, part) for part in parts}


def vllm_quantises_on_gpus(generation: GenerationConfig, cluster: ClusterConfig) -> Iterator[Violation]:
    """Its methods that quantise while loading want CUDA."""
    if not isinstance(generation, VllmGenerationConfig) or generation.quantization is None:
        return
    if cluster.gpus_per_node == 0:
        mend = "quantising while loading wants GPUs, and cluster.gpus_per_node is 0: leave it out"
        yield Violation("generation.quantization", generation.quantization, mend)
