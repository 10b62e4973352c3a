"""Trackers: services and files outside of the run folder to which a run reports its metrics."""

import importlib.util
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from .base import Config


class _Tracker(Config):
    module: ClassVar[str]
    """The module of its package."""
    requirement: ClassVar[str]
    """What to install for it."""


class TensorBoardConfig(_Tracker):
    """Event files in `trackers/tensorboard` of the run folder."""

    module, requirement = "tensorboard", "nemorl[trackers]"
    name: Literal["tensorboard"] = "tensorboard"


class WandbConfig(_Tracker):
    """Weights & Biases."""

    module, requirement = "wandb", "wandb"
    name: Literal["wandb"] = "wandb"
    project: str = "nemorl"
    """Name of the project."""
    entity: str | None = None
    """User or team; null is the default of the login."""
    group: str | None = None
    """Runs of a group are shown together."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files that `wandb sync` uploads later."""


class MlflowConfig(_Tracker):
    """MLflow."""

    module, requirement = "mlflow", "mlflow-skinny"
    name: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = None
    """Address of a server or a store; null keeps files in `trackers/mlflow` of the run folder."""
    experiment: str = "nemorl"
    """Name of the experiment that the run belongs to."""


class TrackioConfig(_Tracker):
    """Trackio: local files, or a Space of the Hugging Face hub."""

    module, requirement = "trackio", "trackio"
    name: Literal["trackio"] = "trackio"
    project: str = "nemorl"
    """Name of the project."""
    space_id: str | None = None
    """The Space that shows the project; null keeps it in `trackers/trackio` of the run folder."""


class SwanlabConfig(_Tracker):
    """SwanLab."""

    module, requirement = "swanlab", "swanlab"
    name: Literal["swanlab"] = "swanlab"
    project: str = "nemorl"
    """Name of the project."""
    workspace: str | None = None
    """User or organization; null is the default of the login."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files that `swanlab sync` uploads later."""


def _section(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


TrackerConfig = Annotated[
    TensorBoardConfig | WandbConfig | MlflowConfig | TrackioConfig | SwanlabConfig,
    Field(discriminator="name"),
    BeforeValidator(_section),
]


def missing_trackers(trackers: Sequence[TrackerConfig]) -> list[TrackerConfig]:
    """Those whose package is not installed. Nothing is imported."""
    return [tracker for tracker in trackers if importlib.util.find_spec(tracker.module) is None]
