"""The models of a run beside the policy, and where each lives.

Each is a group of processes of the same kind as the policy's. What its section leaves open is as in `policy`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from .base import Config, default_variant
from .policy import (
    AdamConfig,
    ConstantSchedule,
    LayoutConfig,
    LoraConfig,
    MoeConfig,
    OffloadConfig,
    OptimizerConfig,
    PolicyConfig,
    RecomputeConfig,
    ScheduleConfig,
)


class ModelGroupConfig(Config):
    """What all groups beside the policy may say of themselves."""

    model_path: Path | None = None
    """Folder of a Hugging Face model; null is the policy's."""
    devices: Literal["own", "policy"] = "own"
    """`own`: devices of its own. `policy`: the policy's devices, with which it takes turns."""
    layout: LayoutConfig | None = None
    """How it is spread over processes; null is as the policy."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Type of the weights in forward and backward; null is the policy's."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Most tokens of one pass; null is as the policy."""
    offload: OffloadConfig = OffloadConfig()
    """What leaves the policy's devices while another group has them."""

    def worker_config(self, policy: PolicyConfig) -> PolicyConfig:
        """The group as the section of a policy, which its processes are started with."""
        own = {
            "model_path": self.model_path,
            "layout": self.layout,
            "precision": self.precision,
            "micro_batch_tokens": self.micro_batch_tokens,
        }
        given = {name: value for name, value in own.items() if value is not None}
        return policy.model_copy(update={**given, "offload": self.offload, "moe": MoeConfig()})


class ReferenceConfig(ModelGroupConfig):
    """A reference in processes of its own; another model than the policy's may be one."""

    def worker_config(self, policy: PolicyConfig) -> PolicyConfig:
        """Without adapters: it is the model as its folder has it."""
        return super().worker_config(policy).model_copy(update={"lora": None})


class ModelTeacherConfig(ModelGroupConfig):
    """A frozen model in processes of the run, with the policy's vocabulary."""

    kind: Literal["model"] = "model"
    model_path: Path
    """Folder of a Hugging Face model."""

    def worker_config(self, policy: PolicyConfig) -> PolicyConfig:
        """Without adapters: it is the model as its folder has it."""
        return super().worker_config(policy).model_copy(update={"lora": None})


class EndpointTeacherConfig(Config):
    """A server with OpenAI's /v1/completions that takes token ids and tells `prompt_logprobs`: vLLM's.

    It has the policy's tokens, and logprobs at temperature 1.
    """

    kind: Literal["endpoint"]
    base_url: str = Field(min_length=1)
    """Address of the server up to and with `/v1`."""
    model: str = Field(min_length=1)
    """What the server calls the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key; the key itself never stands in a config."""
    max_concurrent_requests: int = Field(16, ge=1)
    """Requests under way at a time, of each data-parallel rank of the policy; more wait there."""
    max_retries: int = Field(6, ge=0)
    """Times a request is sent again after status 429, 5xx or a broken connection."""


TeacherConfig = Annotated[
    ModelTeacherConfig | EndpointTeacherConfig,
    Field(discriminator="kind"),
    default_variant(ModelTeacherConfig, "kind"),
]


def teachers_held(teachers: Mapping[str, TeacherConfig]) -> dict[str, ModelTeacherConfig]:
    """Those that live in processes of the run."""
    return {name: one for name, one in teachers.items() if isinstance(one, ModelTeacherConfig)}


class CriticConfig(ModelGroupConfig):
    """The model that says what may still be expected; it learns with an optimizer of its own."""

    lora: LoraConfig | None = None
    """Train adapters and the head; null trains all weights."""
    recompute: RecomputeConfig | None = None
    """Which activations are computed again in the backward pass; null is as the policy."""
    optimizer: OptimizerConfig = AdamConfig(lr=1e-5)
    """The optimizer."""
    schedule: ScheduleConfig = ConstantSchedule()
    """The learning rate over the critic's optimizer steps."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients of a larger norm are scaled down to it; null clips nothing."""

    def worker_config(self, policy: PolicyConfig) -> PolicyConfig:
        """With a scalar head and the critic's own training."""
        own = {
            "head": "scalar",
            "lora": self.lora,
            "recompute": self.recompute or policy.recompute,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "max_grad_norm": self.max_grad_norm,
        }
        return super().worker_config(policy).model_copy(update=own)
