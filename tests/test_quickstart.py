"""What `make quickstart` promises. Slow: it is the quickstart."""

import subprocess
import sys
from pathlib import Path

import pytest

from nemorl.observe.metrics import read_metrics

pytestmark = pytest.mark.slow


def nemorl(*arguments: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "nemorl.cli", *arguments], cwd=folder, check=True, timeout=600)


def test_grpo_lifts_held_out_accuracy_by_25_points_to_80_percent(tmp_path):
    configs = Path("configs/quickstart").absolute()
    nemorl("models", "create", "arithmetic", "models/arithmetic", folder=tmp_path)
    nemorl("train", str(configs / "sft.yaml"), folder=tmp_path)
    nemorl("train", str(configs / "grpo.yaml"), folder=tmp_path)
    steps = read_metrics(tmp_path / "runs/quickstart/grpo/metrics.jsonl")
    accuracy = [s.values["validation/accuracy"] for s in steps if "validation/accuracy" in s.values]
    assert accuracy[-1] >= 0.8
    assert accuracy[-1] - accuracy[0] >= 0.25
