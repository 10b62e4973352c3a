"""Our settings as vLLM's arguments, and the environment of its processes. Imports neither vLLM nor torch."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.config.generation import (
    ADAPTER_RANKS,
    DraftModelConfig,
    Eagle3Config,
    MtpConfig,
    PromptLookupConfig,
    VllmGenerationConfig,
    VllmSpeculation,
)
from nemorl.config.policy import LoraConfig
from nemorl.config.quantization import QuantizationConfig
from nemorl.generation.tokens import engine_seed
from nemorl.generation.types import EngineOptions, GenerationRequest

LEARNED_LAYOUT = "NEMORL_VLLM_LEARNED_LAYOUT"  # learn, while loading, where shards of weights belong
TRAINED_DRAFTS = "NEMORL_VLLM_TRAINED_DRAFTS"  # updates bring the layers or the head that drafts too
QUANTIZATION = "NEMORL_VLLM_QUANTIZATION"  # a `QuantizationConfig` by which workers quantize weights
OWNER = "NEMORL_VLLM_OWNER"  # the process id of the replica, with which all processes of its engine end
ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0: a worker without others is in the engine's process
EXTENSION = "nemorl.generation.vllm_engine.worker.VllmWorkerExtension"
_BATCHED_TOKENS = 2048  # of a step, on a CPU


def environment(
    config: VllmGenerationConfig,
    options: EngineOptions,
    sockets: Path,
    quantization: QuantizationConfig | None = None,
    *,
    trained_drafts: bool = False,
) -> dict[str, str]:
    """Variables to set before vLLM is imported, for all its processes; `sockets` is for their sockets.

    With `quantization` workers quantize the weights that they load or receive; with `trained_drafts` they
    receive the layers or the head that drafts as well.
    """
    variables = {
        OWNER: str(os.getpid()),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_RPC_BASE_PATH": str(sockets),
        "GLOO_SOCKET_IFNAME": "lo",  # its ranks are all on this machine
    }
    update = config.update_on(options.device, quantizes=quantization is not None)
    if quantization is not None:
        variables[QUANTIZATION] = quantization.model_dump_json()
    if config.adapters == "merged" and update != "reload":
        variables[LEARNED_LAYOUT] = "1"
    if trained_drafts:
        variables[TRAINED_DRAFTS] = "1"
    if options.device == "cpu":
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gigabytes),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several ranks on one NUMA node are refused otherwise
        }
        if config.ranks_per_replica == 1:
            # Otherwise vLLM 0.32 takes "mp" for "uni", to bind the threads of a worker. None is bound here,
            # and EngineCore takes a core to poll for the answers of a worker in another process.
            variables[ONE_PROCESS] = "0"
        if options.threads:
            variables["OMP_NUM_THREADS"] = str(max(1, options.threads // config.ranks_per_replica))
    return variables


def engine_arguments(
    config: VllmGenerationConfig,
    options: EngineOptions,
    *,
    return_experts: bool = False,
    lora: LoraConfig | None = None,
    projections: Sequence[str] = (),
    quantization_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """For `AsyncEngineArgs`; with `lora` the engine computes adapters of these `projections`.

    `quantization_config` is that of config.json, for a model whose folder has none.
    """
    device = options.device
    arguments: dict[str, Any] = {
        "model": str(options.model_path),
        "skip_tokenizer_init": True,  # tokens go in and out
        "dtype": config.precision or options.precision,
        "max_model_len": options.max_sequence_length,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        # A worker without others is in the process of the engine: a step takes no messages between them.
        "distributed_executor_backend": "uni" if config.ranks_per_replica == 1 else "mp",
        "enforce_eager": (device == "cpu") if config.enforce_eager is None else config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "enable_sleep_mode": device == "cuda",
    }
    if device == "cuda":
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    else:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_gigabytes * 2**30
        # A prompt read in parts takes a draw back, which a CPU's random numbers cannot: vLLM 0.32 dies.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(_BATCHED_TOKENS, options.max_sequence_length)
    if quantization_config is not None:
        arguments["hf_overrides"] = {"quantization_config": quantization_config}
    if return_experts:
        arguments["enable_return_routed_experts"] = True
    if lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in ADAPTER_RANKS if rank >= lora.rank),
            "lora_target_modules": list(projections),
        }
    if config.speculation is not None:
        arguments["speculative_config"] = _speculation(config.speculation, config.tensor_parallel_size)
    if config.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_num_batched_tokens
    return arguments | config.vllm_kwargs


def _speculation(config: VllmSpeculation, tensor_parallel_size: int) -> dict[str, Any]:
    """The fields of vLLM's `SpeculativeConfig`."""
    drafts: dict[str, Any] = {"num_speculative_tokens": config.max_tokens}
    match config:
        case PromptLookupConfig():
            return drafts | {
                "method": "ngram",
                "prompt_lookup_max": config.max_match,
                "prompt_lookup_min": config.min_match,
            }
        case DraftModelConfig() | Eagle3Config():
            return drafts | {
                "method": config.method,
                "model": str(config.model_path),
                "draft_tensor_parallel_size": tensor_parallel_size,  # vLLM takes no other
            }
        case MtpConfig():
            return drafts | {"method": "mtp"}


def sampling_arguments(request: GenerationRequest, max_sequence_length: int) -> Mapping[str, Any]:
    """For vLLM's `SamplingParams`. Nothing ends a turn but what the request names."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": engine_seed(request),
        "max_tokens": min(request.max_new_tokens, max_sequence_length - len(request.prompt)),
        "stop_token_ids": sorted(request.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 0,  # the sampled token's alone
        "routed_experts_prompt_start": request.routed_experts_from,
    }
