"""One Slurm for the tests of this folder, a place to run in, and what a run there has to equal."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemorl.models.create import create_tiny_model
from tests import required
from tests.slurm.cluster import SlurmCluster
from tests.slurm.configuration import missing
from tests.slurm.jobs import Metrics, Place, metrics

SHORTENED = Path(__file__).parent / "shortened.yaml"
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Two nodes of four CPUs each; skipped with the reason where Slurm is not installed."""
    absent = missing()
    if absent:
        required.missing("slurm", f"Slurm is not installed: no {', '.join(absent)}")
    with SlurmCluster(cpus=4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def place(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A folder with the quickstart's configs, the shortened one and an untrained model."""
    folder = tmp_path_factory.mktemp("place")
    for config in (*QUICKSTART.glob("*.yaml"), SHORTENED):
        shutil.copy(config, folder)
    create_tiny_model(folder / "model", seed=0)
    return Place(slurm, folder)


@pytest.fixture(scope="session")
def local_run(place: Place) -> Callable[[str], Metrics]:
    """The metrics of a run on this machine without Slurm, by what it adds to the shortened config."""
    known: dict[str, Metrics] = {}

    def run(text: str) -> Metrics:
        if text not in known:
            config = place.config(f"local-{len(known)}", text)
            place.nemorl("train", config.name)
            known[text] = metrics(place.folder / "runs" / config.stem)
        return known[text]

    return run
