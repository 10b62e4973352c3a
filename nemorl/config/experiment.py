"""The root of an experiment file, and the fields that follow from others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from .algorithm import AlgorithmConfig
from .auxiliary import CriticConfig, ReferenceConfig, TeacherConfig, auxiliary_models
from .base import SIMPLE, Config, Key
from .data import DataConfig
from .environment import EnvConfig, RewardConfig, SingleTurnEnvConfig
from .generation import GenerationConfig, TorchGenerationConfig
from .policy import PolicyConfig
from .run import CheckpointingConfig, ClusterConfig, LoggerConfig


class Experiment(Config):
    """Paths are relative to the folder in which the command runs."""

    run_dir: Path
    """Folder of the run: resolved config, metrics, samples, checkpoints, report."""
    seed: int = Field(42, ge=0)
    """Seed of the task order and of sampling; with the default, too, a run can be repeated."""
    policy: PolicyConfig
    """The model that is trained."""
    generation: GenerationConfig = TorchGenerationConfig()
    """The engine that samples."""
    data: DataConfig
    """Where tasks come from."""
    env: EnvConfig = SingleTurnEnvConfig()
    """The environment that the policy acts in."""
    rewards: tuple[RewardConfig, ...] = Field((), json_schema_extra=SIMPLE)
    """Functions, reward models and judges, in addition to the environment's reward."""
    algorithm: AlgorithmConfig
    """What is optimized."""
    critic: CriticConfig | None = None
    """The critic, if `algorithm.critic` is set; null is the policy's model, in separate processes."""
    reference: ReferenceConfig | None = None
    """The reference policy in separate processes; null keeps its weights in the policy's."""
    teachers: dict[Key, TeacherConfig] = Field(default_factory=dict, json_schema_extra=SIMPLE)
    """Models that distillation learns from, by names of your choice."""
    cluster: ClusterConfig = ClusterConfig()
    """Where processes run."""
    logger: LoggerConfig = LoggerConfig()
    """What is shown and recorded."""
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    """Which checkpoints are written and kept."""

    @property
    def samples_ahead(self) -> bool:
        """True if engines sample while the policy trains."""
        return self.algorithm.allows_staleness and not self.generation.takes_turns


def derived_fields(sections: Mapping[str, Any]) -> dict[str, str]:
    """The fields, true, that follow from others in these sections of an experiment, with the reason."""
    if not {"generation", "cluster", "algorithm", "policy"} <= sections.keys():
        return {}
    shared = sections["generation"].shares_devices and sections["cluster"].gpus_per_node
    if not (shared and sections["algorithm"].generates):
        return {}
    # Engines that share the policy's GPUs need the memory of the models there.
    fields = ["policy.offload.weights", "policy.offload.optimizer"]
    for path, model in auxiliary_models(sections).items():
        if model.devices == "policy":
            fields.append(f"{path}.offload.weights")
            if path == "critic":  # the only one that is trained
                fields.append(f"{path}.offload.optimizer")
    return dict.fromkeys(fields, "follows from generation.colocated")


def with_derived_fields(sections: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(sections)
    for field in derived_fields(sections):
        result = _with_true(result, field.split("."))
    return result


def _with_true(section: Any, path: Sequence[str]) -> Any:
    """A section, or a mapping or list of sections, with a field set to true unless it is set."""
    if not path:
        return True
    step, *rest = path
    if isinstance(section, dict):
        return section | {step: _with_true(section[step], rest)}
    if isinstance(section, tuple):
        index = int(step)
        return (*section[:index], _with_true(section[index], rest), *section[index + 1 :])
    if not rest and step in section.model_fields_set:
        return section
    return section.model_copy(update={step: _with_true(getattr(section, step), rest)})


def field_value(sections: Mapping[str, Any], field: str) -> Any:
    value: Any = sections
    for step in field.split("."):
        if isinstance(value, Config):
            value = getattr(value, step)
        else:
            value = value[int(step)] if isinstance(value, tuple) else value[step]
    return value
