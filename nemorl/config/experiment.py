"""The whole of an experiment file."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from .algorithm import AlgorithmConfig
from .auxiliary import CriticConfig, ReferenceConfig, TeacherConfig
from .base import Config
from .data import DataConfig
from .environment import EnvConfig, RewardConfig, SingleTurnEnvConfig
from .generation import GenerationConfig, TorchGenerationConfig
from .policy import PolicyConfig
from .run import CheckpointingConfig, ClusterConfig, LoggerConfig


class Experiment(Config):
    """Paths are relative to the folder in which the command is run, as on any command line."""

    run_dir: Path
    """Folder of the run: resolved config, metrics, samples, checkpoints, report."""
    seed: int = Field(42, ge=0)
    """Seed of everything that is drawn: task order and sampling."""
    policy: PolicyConfig
    """The model that learns."""
    generation: GenerationConfig = TorchGenerationConfig()
    """The engine that samples."""
    data: DataConfig
    """Where tasks come from."""
    env: EnvConfig = SingleTurnEnvConfig()
    """What the policy acts in."""
    rewards: tuple[RewardConfig, ...] = ()
    """Functions, reward models and judges, beside the environment's own reward."""
    algorithm: AlgorithmConfig
    """What is optimised."""
    critic: CriticConfig | None = None
    """The critic of an algorithm that has one; null is as the policy, in processes of its own.

    Whether there is one says `algorithm.critic`.
    """
    reference: ReferenceConfig | None = None
    """The reference policy in processes of its own; null keeps its weights in the policy's."""
    teachers: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], TeacherConfig] = Field(
        default_factory=dict
    )
    """Models that an algorithm of distillation learns from, by names of one's own."""
    cluster: ClusterConfig = ClusterConfig()
    """Where processes run."""
    logger: LoggerConfig = LoggerConfig()
    """What is shown and recorded."""
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    """What is kept."""
