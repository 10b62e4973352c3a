"""The benchmark of the driver, with few workers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale.py"


@pytest.mark.slow
def test_rows_are_of_the_work_that_was_asked_for(tmp_path: Path) -> None:
    sizes = ["--workers", "8", "128", "--trajectories-per-worker", "4"]
    lasting = ["--steps", "1", "--generation-seconds", "0.5"]
    subprocess.run([sys.executable, SCRIPT, *sizes, *lasting], cwd=tmp_path, check=True, timeout=900)
    result = json.loads((tmp_path / "runs/bench/scale.json").read_text(encoding="utf-8"))
    assert (result["steps"], result["generation_seconds"]) == (1, 0.5)
    direct, relayed = result["rows"]
    assert (direct["workers"], direct["trajectories"]) == (8, 2 * 16)
    assert (relayed["workers"], relayed["trajectories"]) == (128, 32 * 16)
    for row in (direct, relayed):
        assert 0 < row["main_thread_seconds"] < row["cpu_seconds"]
        assert row["share_of_step_percent"] == pytest.approx(row["cpu_seconds"])  # of 100 s
        assert row["megabytes_received"] > 0
    # Four ranks share two groups. Of the 64 each four do so too, and only exchange a few sequences.
    assert 4 <= direct["lists_read"] <= 8
    assert 64 <= relayed["lists_read"] <= 64 * 3
