from collections.abc import Callable
from pathlib import Path

import pytest

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from tests.config.experiments import write
from tests.plan.models import write_model

Configure = Callable[..., Experiment]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound model folder."""
    return write_model(tmp_path / "model")


@pytest.fixture
def configure(tmp_path: Path, model: Path) -> Configure:
    """Make a sound experiment, with overrides, on the model."""
    file = write(tmp_path)

    def made(*overrides: str) -> Experiment:
        return load_experiment(file, [f"policy.model_path={model}", *overrides])

    return made
