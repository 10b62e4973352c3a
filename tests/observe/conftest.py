"""A small run folder to look at."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from nemorl.observe.files import JsonLinesWriter
from nemorl.observe.metrics import Sample, StepMetrics
from nemorl.observe.run_folder import RunPaths
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
        for path, lines in (
            (paths.metrics, [step.to_json() for step in steps]),
            (paths.samples, [asdict(sample) for sample in samples or []]),
        ):
            with closing(JsonLinesWriter(path)) as writer:
                for line in lines:
                    writer.append(line)
        return run_dir

    return write
