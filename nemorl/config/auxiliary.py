"""The auxiliary models of a run (critic, reference, teachers), each in processes like the policy's."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from nemorl.errors import Problem, Problems

from .base import EXPERT, Config, Variants, check, counted
from .generation import ADDRESS, is_address
from .policy import (
    AdamConfig,
    ChosenRecompute,
    ConstantSchedule,
    LayoutConfig,
    LoraConfig,
    MoeConfig,
    NoRecompute,
    OffloadConfig,
    OptimizerConfig,
    PolicyConfig,
    ScheduleConfig,
    UpdateGuardsConfig,
    decay_problems,
)
from .run import ClusterConfig

if TYPE_CHECKING:
    from .algorithm import AlgorithmConfig


class ModelGroupConfig(Config):
    """Fields of all auxiliary models; what is not set is as in `policy`."""

    model_path: Path | None = None
    """Folder of a Hugging Face model; null is the policy's."""
    devices: Literal["own", "policy"] = "own"
    """`own`: separate devices. `policy`: the policy's devices, which the two use in turn."""
    layout: LayoutConfig | None = None
    """Its layout over processes; null is the policy's."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Type of the weights in forward and backward; null is the policy's."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Most tokens of one pass; null is the policy's."""
    offload: OffloadConfig = OffloadConfig()
    """What leaves the policy's devices while another group has them."""

    def worker_config(self, policy: PolicyConfig) -> PolicyConfig:
        """The section of a policy with which the processes of the group are started."""
        names = {"model_path", "layout", "precision", "micro_batch_tokens"}
        given = {name: value for name, value in self if name in names and value is not None}
        without = dict.fromkeys(("lora", "quantization", "fp8", "multi_token_prediction", "draft"))
        plain = {"moe": MoeConfig(), "offload": self.offload}
        return policy.model_copy(update={**given, **without, **plain})

    @check
    def _has_devices(self, policy: PolicyConfig) -> Problems:
        if self.devices == "own":
            reason = "devices is `own`, so nothing waits for them; set it to false"
            yield from self.offload.without_effect(("weights", "optimizer"), reason, "offload.")
            return
        size, available = self.worker_config(policy).layout.world_size, policy.layout.world_size
        if size > available:
            have = counted(available, "process")
            fix = f"the policy has devices for {have}; use a smaller layout, or `own` devices"
            yield Problem("layout", counted(size, "process"), fix)

    @check
    def _micro_batch_holds_sequence(self, policy: PolicyConfig) -> Problems:
        if self.micro_batch_tokens is not None:
            yield from self.worker_config(policy).micro_batch_holds_sequence()


class ReferenceConfig(ModelGroupConfig):
    """A reference in separate processes; it may be another model than the policy's."""


class TeacherBase(Config):
    key: str | tuple[str, ...] | None = None
    """What the tasks that it teaches have in the column `algorithm.teacher_key`, or a list of such values;
    null is its name."""
    default: bool = False
    """It also teaches the tasks whose value in this column is of no teacher."""

    def keys(self, name: str) -> tuple[str, ...]:
        """The values of the column, of a teacher with this name."""
        if isinstance(self.key, tuple):
            return self.key
        return (self.key or name,)

    @check
    def _has_tasks(self) -> Problems:
        if self.key == ():
            yield Problem("key", [], "it teaches no task; name a value, or set it to null")


class ModelTeacherConfig(ModelGroupConfig, TeacherBase):
    """A frozen model in processes of the run, with the policy's vocabulary."""

    kind: Literal["model"] = "model"
    model_path: Path
    """Folder of a Hugging Face model."""


class EndpointTeacherConfig(TeacherBase):
    """A server with OpenAI's /v1/completions that takes token ids and returns `prompt_logprobs`: vLLM's.

    It must have the policy's tokens, and returns logprobs at temperature 1.
    """

    kind: Literal["endpoint"]
    base_url: str = Field(min_length=1)
    """Address of the server up to and with `/v1`."""
    model: str = Field(min_length=1)
    """The server's name of the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key; the key itself never is in a config."""
    max_concurrent_requests: int = Field(16, ge=1)
    """Concurrent requests of each data-parallel rank of the policy; more wait."""
    max_retries: int = Field(6, ge=0)
    """Retries of a request after status 429, 5xx or a broken connection."""

    @check
    def _address_is_complete(self) -> Problems:
        if not is_address(self.base_url):
            yield Problem("base_url", self.base_url, ADDRESS)


TeacherConfig = Annotated[ModelTeacherConfig | EndpointTeacherConfig, Variants(ModelTeacherConfig, by="kind")]
Teachers = dict[str, TeacherConfig]


def teachers_by_key(teachers: Mapping[str, TeacherConfig]) -> dict[str, str]:
    """The name of the teacher of each value of the column `algorithm.teacher_key`."""
    return {key: name for name, one in teachers.items() for key in one.keys(name)}


def default_teacher(teachers: Mapping[str, TeacherConfig]) -> str | None:
    """The name of the teacher of all other values of this column."""
    return next((name for name, one in teachers.items() if one.default), None)


def teachers_held(teachers: Mapping[str, TeacherConfig]) -> dict[str, ModelTeacherConfig]:
    return {name: one for name, one in teachers.items() if isinstance(one, ModelTeacherConfig)}


class CriticConfig(ModelGroupConfig):
    """The model that estimates returns; it has its own optimizer."""

    normalize_values: bool = Field(False, json_schema_extra=EXPERT)
    """Subtract `mean` of the model's config.json from its values and divide them by its `std` (OpenRLHF's
    `normalize_enable`)."""
    lora: LoraConfig | None = None
    """Train adapters and the head; null trains all weights."""
    recompute: Annotated[ChosenRecompute, Variants(NoRecompute)] | None = None
    """Which activations are recomputed in the backward pass; null is the policy's."""
    optimizer: OptimizerConfig = AdamConfig(lr=1e-5)
    """The optimizer."""
    schedule: ScheduleConfig = ConstantSchedule()
    """The learning rate over the critic's optimizer steps."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients of a larger norm are scaled down to it; null clips nothing."""
    guards: UpdateGuardsConfig = UpdateGuardsConfig()
    """Limits beyond which an optimizer step of the critic is skipped."""

    def worker_config(self, policy: PolicyConfig) -> PolicyConfig:
        names = ("normalize_values", "lora", "optimizer", "schedule", "max_grad_norm", "guards")
        fields = {name: getattr(self, name) for name in names}
        fields |= {"head": "scalar", "recompute": self.recompute or policy.recompute}
        return super().worker_config(policy).model_copy(update=fields)

    @check
    def _decay_goes_down(self) -> Problems:
        yield from decay_problems("critic", self.optimizer, self.schedule)

    @check
    def _narrow_types_have_a_kernel(self, policy: PolicyConfig, cluster: ClusterConfig) -> Problems:
        yield from self.worker_config(policy).narrow_types_have_a_kernel(cluster)


def auxiliary_models(sections: Mapping[str, Any]) -> dict[str, ModelGroupConfig]:
    """The auxiliary models, reward models too, that have a section, by its path such as `teachers.main`."""
    candidates = {name: sections.get(name) for name in ("critic", "reference")}
    candidates |= {f"teachers.{name}": teacher for name, teacher in sections.get("teachers", {}).items()}
    candidates |= {f"rewards.{index}": reward for index, reward in enumerate(sections.get("rewards", ()))}
    return {path: model for path, model in candidates.items() if isinstance(model, ModelGroupConfig)}


def used_models(
    algorithm: "AlgorithmConfig", auxiliary: Mapping[str, ModelGroupConfig]
) -> dict[str, ModelGroupConfig]:
    """Those of `auxiliary_models` that the algorithm uses, and its critic, which needs no section."""
    used = {
        "critic": algorithm.keeps_critic,
        "reference": algorithm.keeps_reference,
        "teachers": algorithm.keeps_teachers,
        "rewards": True,
    }
    models = {"critic": CriticConfig()} | dict(auxiliary)
    return {path: model for path, model in models.items() if used[path.partition(".")[0]]}
