"""Whole runs that train on filtered samples: what engine and trainer compute for the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.models.create import create_tiny_model
from nemorl.observe.metrics import StepMetrics
from tests.required import require_vllm
from tests.run.runs import finish, lines, start, write_experiment

pytestmark = pytest.mark.ci
FILTERS = {"top_k": 8, "top_p": 0.9}


def run(folder: Path, model: Path, **generation: Any) -> list[StepMetrics]:
    """Three steps with a divergence in the loss, under TP2 and the filters."""
    path = write_experiment(folder, model, "run")
    tree = yaml.safe_load(path.read_text())
    tree["generation"] = {"max_new_tokens": 6, "sampling": FILTERS, **generation}
    tree["algorithm"] |= {"num_steps": 3, "validation": {}}
    tree |= {"checkpointing": {"enabled": False}}
    path.write_text(yaml.safe_dump(tree))
    status, output = finish(start("train", path), 500)
    assert status == 0, output
    return lines(folder / "run")


def assert_agrees(steps: list[StepMetrics]) -> None:
    """The gap is rounding, as without filters; the tokens that a filter keeps have little entropy."""
    assert len(steps) == 3
    for step in steps:
        assert 0 < step.values["logprob_gap/max"] < 1e-4
        assert step.values["sampling/dropped"] == 0
        assert 0 < step.values["entropy"] < 2.0794  # the logarithm of top_k
        assert step.values["updates/skipped"] == step.values["updates/empty"] == 0
    assert steps[0].values["kl/reference"] == pytest.approx(0, abs=1e-6)  # of all tokens, on both sides
    assert steps[-1].values["kl/reference"] > 1e-6


def test_the_embedded_engine_and_the_trainer_agree(folder: Path, model: Path) -> None:
    assert_agrees(run(folder, model, max_batch_size=32))


def test_vllm_and_the_trainer_agree(tmp_path: Path) -> None:
    require_vllm()
    model = tmp_path / "model"
    create_tiny_model(model, hidden=64, ffn=128, layers=2, heads=2, kv_heads=2, seed=3)
    assert_agrees(run(tmp_path, model, backend="vllm", threads=1))
