"""Asynchronous runs whose sequences are longer than a step: each mode of `generation.on_update`."""

from pathlib import Path

import pytest

from tests.run.runs import finish, lines, start, tiny_model, write_experiment
from tests.selection import in_all

# What is left of the gap where engine and trainer compute with the same weights, in float32.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "model")


@pytest.mark.parametrize("mode", ["continue", *in_all("finish", "restart")])
def test_an_asynchronous_run_by_mode(tmp_path: Path, model: Path, mode: str) -> None:
    config = write_experiment(
        tmp_path, model, "run",
        policy={"layout": {}, "max_sequence_length": 128, "micro_batch_tokens": 1024,
                "optimizer": {"name": "adam", "lr": 1e-2}},
        generation={"max_new_tokens": 112, "max_batch_size": 1, "threads": 1, "on_update": mode},
        rewards=[{"function": "tests.run.rewards:differs"}],
        algorithm={"num_steps": 4, "num_generations_per_prompt": 32, "num_prompts_per_step": 2,
                   "max_staleness": 1, "max_logprob_gap": 9.0,
                   "correction": {"name": "tis"}, "validation": {}},
        data={"validation": None}, checkpointing={"period": 100},
    )  # fmt: skip
    status, output = finish(start("train", config))
    assert status == 0, output
    steps = [step.values for step in lines(tmp_path / "run")]
    assert len(steps) == 4
    assert all(s["version/lag_max"] <= 1 for s in steps)
    assert max(s["version/lag_max"] for s in steps) == 1
    assert all(s["errors"] == 0 for s in steps)
    spread = [s["version/spread"] for s in steps]
    assert (max(spread) == 0) if mode == "finish" else (0 < max(spread) <= 1)
    assert steps[0]["staleness/gap_max_0"] < ROUNDING
    # Tokens of the trained version: all of them are the trainer's, unless old keys and values were kept.
    youngest = max(s["staleness/gap_max_0"] for s in steps)
    assert (youngest > 10 * ROUNDING) if mode == "continue" else (youngest < ROUNDING)
    assert all(0 < s["correction/ess"] <= 1 + 1e-6 for s in steps)
