"""Our words in TensorRT-LLM's: the arguments of its engine and of a request."""

from collections.abc import Sequence
from typing import Any

from tensorrt_llm import SamplingParams
from tensorrt_llm.llmapi import KvCacheConfig
from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType, SleepConfig
from tensorrt_llm.sampling_params import LogprobMode

from nemorl.config.generation import TrtllmGenerationConfig
from nemorl.generation.tokens import engine_seed
from nemorl.generation.types import EngineOptions, GenerationRequest

_NO_TOKEN = -1  # we say which tokens end a turn, the engine adds none


def engine_arguments(
    config: TrtllmGenerationConfig, options: EngineOptions, extension: str
) -> dict[str, Any]:
    """What `AsyncLLM` is made with; `extension` is the import path of the class mixed into its workers."""
    arguments: dict[str, Any] = {
        "model": str(options.model_path),
        "backend": "pytorch",
        "dtype": config.precision or options.precision,
        "skip_tokenizer_init": True,  # token ids in and out
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "max_batch_size": config.max_batch_size,
        "max_num_tokens": config.max_num_tokens,
        "max_seq_len": options.max_sequence_length,
        "max_input_len": options.max_sequence_length,  # else 1024
        "kv_cache_config": KvCacheConfig(
            free_gpu_memory_fraction=config.kv_cache_fraction, enable_block_reuse=config.prefix_caching
        ),
        "sleep_config": SleepConfig(),
        "ray_worker_extension_cls": extension,
        **config.trtllm_kwargs,
    }
    if config.in_flight_updates:
        # A step that overlaps with the next one has tokens that no count knows of when an update comes.
        arguments["disable_overlap_scheduler"] = True
    for name in ("moe_tensor_parallel_size", "moe_expert_parallel_size"):
        if (size := getattr(config, name)) is not None:
            arguments[name] = size
    return arguments


def sampling_params(request: GenerationRequest, max_sequence_length: int) -> SamplingParams:
    """A request's own. Stop strings are looked for by us: the engine would look for them as token ids."""
    sampling = request.sampling
    greedy = sampling.temperature == 0
    return SamplingParams(
        max_tokens=min(request.max_new_tokens, max_sequence_length - len(request.prompt)),
        temperature=sampling.temperature,
        top_k=1 if greedy else sampling.top_k or 0,
        top_p=sampling.top_p,  # always given: without top-p and top-k the engine is greedy
        min_p=sampling.min_p,
        seed=engine_seed(request),
        end_id=_NO_TOKEN,
        stop_token_ids=sorted(request.stop_token_ids) or None,
        include_stop_str_in_output=True,
        detokenize=False,
        logprobs=1,
        # Of the distribution sampled; greedy has none, and takes the model's own.
        logprobs_mode=LogprobMode.RAW if greedy else LogprobMode.PROCESSED,
    )


def sampled_logprobs(tokens: Sequence[int], logprobs: Sequence[Any]) -> list[float]:
    """[n] of the sampled tokens, out of the engine's: for each position a number, or several by token."""
    return [
        float(found[token].logprob if isinstance(found, dict) else found)
        for token, found in zip(tokens, logprobs, strict=True)
    ]


def memory_tags(tags: Sequence[str]) -> list[str]:
    """The engine's names for `weights` and `kv_cache`; both, where none is given."""
    cache = ExecutorMemoryType.KV_CACHE.value
    others = [tag.value for tag in ExecutorMemoryType if not tag.value.startswith("_") and tag.value != cache]
    by_ours = {"weights": others, "kv_cache": [cache]}
    return [name for tag in tags or by_ours for name in by_ours[tag]]
