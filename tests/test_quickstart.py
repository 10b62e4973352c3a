"""What `nemorl quickstart` promises. Slow: it is the quickstart."""

import subprocess
import sys

import pytest

from nemorl.observe.metrics import read_metrics

pytestmark = pytest.mark.slow


def test_grpo_lifts_held_out_accuracy_by_25_points_to_80_percent(tmp_path):
    command = [sys.executable, "-m", "nemorl.cli", "quickstart", "--dir", str(tmp_path)]
    subprocess.run(command, check=True, timeout=1200)
    steps = read_metrics(tmp_path / "runs/quickstart/grpo/metrics.jsonl")
    accuracy = [s.values["validation/accuracy"] for s in steps if "validation/accuracy" in s.values]
    assert accuracy[-1] >= 0.8
    assert accuracy[-1] - accuracy[0] >= 0.25
