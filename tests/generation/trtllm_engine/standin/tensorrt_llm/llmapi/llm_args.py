"""The engine's arguments; one that does not exist is refused."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ExecutorMemoryType(StrEnum):
    SAMPLER = "sampler"
    INIT_KV_CACHE = "_no_capture_init_kv_cache"
    MODEL_EXTRA = "model_extra"
    EXTRA_RESOURCES = "executor_extra"
    KV_CACHE = "kv_cache"
    MODEL_ENGINE_MAIN = "model"
    MODEL_WEIGHTS_MAIN = "model_weights"


@dataclass(kw_only=True)
class KvCacheConfig:
    free_gpu_memory_fraction: float | None = 0.9
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    dtype: str = "auto"


@dataclass(kw_only=True)
class SleepConfig:
    restore_modes: dict[ExecutorMemoryType, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class NGramDecodingConfig:
    max_draft_len: int | None = None
    allow_advanced_sampling: bool = False
    use_rejection_sampling: bool = False
    max_matching_ngram_size: int = 2
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True


@dataclass(kw_only=True)
class DraftTargetDecodingConfig:
    max_draft_len: int | None = None
    allow_advanced_sampling: bool = False
    use_rejection_sampling: bool = False
    speculative_model: str | None = None


@dataclass(kw_only=True)
class MTPDecodingConfig:
    max_draft_len: int | None = None
    allow_advanced_sampling: bool = False
    use_rejection_sampling: bool = False
    use_relaxed_acceptance_for_thinking: bool = False


@dataclass(kw_only=True)
class LlmArgs:
    model: str
    backend: str = "pytorch"
    dtype: str = "auto"
    orchestrator_type: str | None = None
    ray_worker_extension_cls: str | None = None
    skip_tokenizer_init: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    max_batch_size: int = 2048
    max_num_tokens: int | None = 8192
    max_seq_len: int | None = None
    max_input_len: int | None = 1024
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    sleep_config: SleepConfig | None = None
    speculative_config: Any = None
    disable_overlap_scheduler: bool = False
    enable_chunked_prefill: bool = False
    ray_placement_config: Any = None
    allreduce_strategy: str = "AUTO"
    trust_remote_code: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size
