"""One Slurm for the tests of this folder."""

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.configuration import missing


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Two nodes of four CPUs each; skipped with the reason where Slurm is not installed."""
    absent = missing()
    if absent:
        reason = f"Slurm is not installed: {', '.join(absent)} missing"
        if "slurm" in os.environ.get("NEMORL_REQUIRE", "").split(","):
            pytest.fail(f"{reason}, and NEMORL_REQUIRE asks for it")
        pytest.skip(reason)
    with SlurmCluster(cpus=4) as cluster:
        yield cluster
