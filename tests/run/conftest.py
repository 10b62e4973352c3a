import shutil
from pathlib import Path

import pytest

from tests.run.runs import tiny_model

BEFORE = pytest.StashKey[set[Path]]()  # what was in the folder before the first attempt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs of a file."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def without_failed_attempts(request: pytest.FixtureRequest) -> None:
    """A test that is repeated after a failure finds none of its runs in the folder of its file."""
    if {"folder", "tmp_path"} & {*request.fixturenames} == {"folder"}:
        runs = set(request.getfixturevalue("folder").iterdir())
        for run in runs - request.node.stash.setdefault(BEFORE, runs):
            shutil.rmtree(run) if run.is_dir() else run.unlink()


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """The model that all runs of a file start from."""
    return tiny_model(folder / "model")
