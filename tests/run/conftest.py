from pathlib import Path

import pytest

from tests.run.runs import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs of a file."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """The model that all runs of a file start from."""
    return tiny_model(folder / "model")
