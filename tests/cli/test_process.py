"""The installed command, as a process: what only a process of its own can show."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.experiments import GRPO, write
from tests.plan.models import write_model

HEAVY = {"torch", "ray", "transformers", "megatron", "numpy", "plotly", "reasoning_gym", "safetensors"}

SHOW_MODULES = """
import json, sys
from nemorl.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
modules = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps([status, modules]))
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    model = write_model(tmp_path / "model")
    return write(tmp_path, GRPO.replace("models/arithmetic", str(model)))


@pytest.mark.parametrize("words", [["--help"], ["check"], ["train", "--dry-run"]], ids=" ".join)
def test_nothing_heavy_is_imported(experiment: Path, words: list[str]) -> None:
    config = [] if words == ["--help"] else [str(experiment)]

    done = subprocess.run(
        [sys.executable, "-c", SHOW_MODULES, *words, *config], capture_output=True, text=True, timeout=60
    )

    status, modules = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr
    assert HEAVY.isdisjoint(modules)


def test_a_users_mistake_shows_no_traceback(experiment: Path) -> None:
    command = [sys.executable, "-m", "nemorl.cli", "train", str(experiment), "policy.lr=1"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert "did you mean `policy.optimizer.lr`?" in done.stderr
    assert "Traceback" not in done.stderr
