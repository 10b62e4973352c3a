"""What TensorRT-LLM cannot do, and what it would do wrong."""

from collections.abc import Iterator

from nemorl.config.generation import GenerationConfig
from nemorl.config.generation_trtllm import TrtllmGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Violation

# Arguments of AsyncLLM that follow from other fields.
OWN_ARGUMENTS = frozenset(
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


def trtllm_wants_gpus(cluster: ClusterConfig, generation: GenerationConfig) -> Iterator[Violation]:
    """It has no CPU path."""
    if isinstance(generation, TrtllmGenerationConfig) and cluster.gpus_per_node == 0:
        mend = "TensorRT-LLM computes on GPUs only, and cluster.gpus_per_node is 0: take torch or vllm"
        yield Violation("generation.backend", generation.backend, mend)


def trtllm_step_holds_prompt(policy: PolicyConfig, generation: GenerationConfig) -> Iterator[Violation]:
    """A prompt is computed in one step, unless the engine may cut it."""
    if not isinstance(generation, TrtllmGenerationConfig):
        return
    length = policy.max_sequence_length
    if generation.max_num_tokens < length and not generation.trtllm_kwargs.get("enable_chunked_prefill"):
        yield Violation(
            "generation.max_num_tokens",
            generation.max_num_tokens,
            f"a step must hold a whole prompt: give it policy.max_sequence_length, {length}, or "
            "trtllm_kwargs.enable_chunked_prefill=true",
        )


def trtllm_experts_fit(generation: GenerationConfig) -> Iterator[Violation]:
    """A mixture's own sizes split the tensor-parallel group."""
    if not isinstance(generation, TrtllmGenerationConfig):
        return
    tensor, expert = generation.moe_tensor_parallel_size, generation.moe_expert_parallel_size
    if tensor is None and expert is None:
        return
    if (tensor or 1) * (expert or 1) != generation.tensor_parallel_size:
        yield Violation(
            "generation.moe_expert_parallel_size",
            expert,
            f"times moe_tensor_parallel_size ({tensor or 1}) it must be tensor_parallel_size "
            f"({generation.tensor_parallel_size})",
        )


def trtllm_updates_in_flight(generation: GenerationConfig) -> Iterator[Violation]:
    """Every token must carry the version that sampled it, and no cache may outlive its weights."""
    if not isinstance(generation, TrtllmGenerationConfig):
        return
    if not generation.in_flight_updates:
        if generation.recompute_kv_cache:
            mend = "nothing is in flight at an update: set it to false, or in_flight_updates to true"
            yield Violation("generation.recompute_kv_cache", True, mend)
        return
    if generation.pipeline_parallel_size > 1:
        mend = (
            "stages hold micro-batches between two steps, whose tokens have no one version: set it to false"
        )
        yield Violation("generation.in_flight_updates", True, mend)
    if generation.prefix_caching and not generation.recompute_kv_cache:
        mend = (
            "sequences that end after an update leave cache of the old weights for others to reuse: set "
            "it to false, or recompute_kv_cache to true"
        )
        yield Violation("generation.prefix_caching", True, mend)


def trtllm_arguments_are_free(generation: GenerationConfig) -> Iterator[Violation]:
    """What a field of ours decides is not given twice."""
    if isinstance(generation, TrtllmGenerationConfig):
        for name in sorted(OWN_ARGUMENTS & generation.trtllm_kwargs.keys()):
            mend = "this follows from other fields of the experiment (docs/trtllm.md): leave it out"
            yield Violation(f"generation.trtllm_kwargs.{name}", generation.trtllm_kwargs[name], mend)
