"""A small run folder to look at, and a disk that is full when a test wants it."""

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from nemorl.observe.metrics import MetricsWriter, StepMetrics
from nemorl.observe.run_folder import RunPaths
from nemorl.observe.samples import Sample, SampleWriter
from tests.observe.examples import CONFIG


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where a run may be created."""
    return tmp_path / "run"


@pytest.fixture
def write_run(run_dir: Path) -> Callable[..., Path]:
    """Write the files of a run as they would lie there, without running one."""

    def write(steps: list[StepMetrics], samples: list[Sample] | None = None, config: str = CONFIG) -> Path:
        paths = RunPaths(run_dir)
        run_dir.mkdir()
        paths.config.write_text(config)
        with MetricsWriter(paths.metrics) as metrics:
            for step in steps:
                metrics.write(step)
        writer = SampleWriter(paths.samples)
        writer.write(samples or [])
        writer.close()
        return run_dir

    return write


@pytest.fixture
def files_end_at() -> Callable[[int], AbstractContextManager[None]]:
    """`with files_end_at(n)`: no file grows beyond n bytes. As on a full disk, a write that would cross n is
    cut there and the next one fails."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit
