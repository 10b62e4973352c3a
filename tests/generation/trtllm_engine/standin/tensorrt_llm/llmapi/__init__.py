from .llm_args import (
    DraftTargetDecodingConfig,
    ExecutorMemoryType,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
)

__all__ = [
    "DraftTargetDecodingConfig",
    "ExecutorMemoryType",
    "KvCacheConfig",
    "MTPDecodingConfig",
    "NGramDecodingConfig",
]
