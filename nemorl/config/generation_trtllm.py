"""`generation` with `backend: trtllm`: TensorRT-LLM with workers in Ray, on CUDA."""

from typing import Any, Literal

from pydantic import Field

from .generation_base import GenerationBase


class TrtllmGenerationConfig(GenerationBase):
    """TensorRT-LLM in NVIDIA's container; written against its documented interface, not run on hardware."""

    backend: Literal["trtllm"]
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that share every layer of one engine."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages of one engine's layers."""
    moe_tensor_parallel_size: int | None = Field(None, ge=1)
    """Of a mixture's experts; with the next field it multiplies to tensor_parallel_size."""
    moe_expert_parallel_size: int | None = Field(None, ge=1)
    """Groups over which a mixture's experts are spread."""
    max_batch_size: int = Field(256, ge=1)
    """Sequences decoded together; more wait."""
    max_num_tokens: int = Field(8192, ge=1)
    """Tokens of one step, prompts included."""
    kv_cache_fraction: float = Field(0.8, gt=0, lt=1)
    """Part of the GPU memory that the weights leave, for the KV cache."""
    prefix_caching: bool = True
    """Reuse the KV cache of equal beginnings."""
    weight_delivery: Literal["handles", "workers"] = "handles"
    """`handles`: the replica's process gathers weights in host memory, while sampling goes on, and hands them
    to its workers by CUDA IPC; all on one machine. `workers`: each worker receives for itself, with no memory
    but buckets, while the engine stands still."""
    in_flight_updates: bool = False
    """Sequences in flight go on with new weights; otherwise they end before an update."""
    recompute_kv_cache: bool = False
    """After an update in flight, compute the KV cache of what goes on anew."""
    trtllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `tensorrt_llm.AsyncLLM`, by its names."""

    @property
    def ranks_per_replica(self) -> int:
        """GPUs of one engine, each with a worker."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
