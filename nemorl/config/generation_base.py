"""What `generation` has whatever the engine, and how it samples."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Config
from .endpoint import EndpointConfig


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
