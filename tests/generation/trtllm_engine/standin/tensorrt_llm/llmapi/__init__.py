from .llm_args import ExecutorMemoryType, KvCacheConfig

__all__ = ["ExecutorMemoryType", "KvCacheConfig"]
