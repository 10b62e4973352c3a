"""A local Ray for the tests of this folder, with places for healthy groups and for groups that fail.

It ends with the folder: a Ray left behind would be joined by the next test that needs one of its own size. It
has GPUs that are numbers and nothing more.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from nemorl.cluster.group import Mesh, WorkerGroup
from nemorl.cluster.placement import Placement, WorkerRequest, reserve
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.run import ClusterConfig
from tests.cluster.recorders import start_recorders

RESERVED = (WorkerRequest("policy", 4), WorkerRequest("generation", 2), WorkerRequest("fragile", 2))
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
FREE = WorkerRequest("free", 7)  # left for drivers that join, and for tests that reserve
GPUS = 2

StartFragile = Callable[..., WorkerGroup]


@pytest.fixture(scope="package")
def runtime() -> Iterator[ClusterRuntime]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", functools.partial(ray.init, num_gpus=GPUS))
        with ClusterRuntime(ClusterConfig(object_store_megabytes=100), [*RESERVED, FREE]) as started:
            yield started


@pytest.fixture(scope="package")
def placement(runtime: ClusterRuntime) -> Placement:
    wanted = reserve(RESERVED, strategy="PACK", deadline_seconds=60, can_grow=False, environment=LOOPBACK)
    return asyncio.run(wanted)


@pytest.fixture(scope="package")
def policy(placement: Placement, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    """Four synchronous ranks: TP2 x DP2."""
    group = asyncio.run(
        start_recorders(
            "policy",
            4,
            placement,
            tmp_path_factory.mktemp("run"),
            threads=3,
            mesh=Mesh(same_share=2, data=2),
            environment={"GREETING": "hello"},
        )
    )
    yield group
    asyncio.run(group.shutdown())


@pytest.fixture(scope="package")
def generation(placement: Placement, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    """Two asynchronous ranks."""
    group = asyncio.run(
        WorkerGroup.start(
            "generation",
            "tests.cluster.targets:Streamer",
            [{}, {}],
            placement=placement,
            threads=1,
            run_dir=tmp_path_factory.mktemp("run"),
            deadline_seconds=60,
            concurrent=True,
        )
    )
    yield group
    asyncio.run(group.shutdown())


@pytest.fixture
def start_fragile(placement: Placement, tmp_path: Path) -> Iterator[StartFragile]:
    """Starts a group, of two unless said otherwise, that the test may break."""
    groups: list[WorkerGroup] = []

    def start(target: str = "Recorder", ranks: int = 2, **options: Any) -> WorkerGroup:
        kwargs = [{"rank": rank} if target == "Recorder" else {} for rank in range(ranks)]
        settings = {
            "placement": placement,
            "threads": 1,
            "run_dir": tmp_path,
            "deadline_seconds": 60,
            **options,
        }
        groups.append(
            asyncio.run(WorkerGroup.start("fragile", f"tests.cluster.targets:{target}", kwargs, **settings))
        )
        return groups[-1]

    yield start
    for group in groups:
        asyncio.run(group.shutdown())
