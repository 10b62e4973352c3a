"""Whole runs whose updates are skipped, and that return to an earlier checkpoint with other data."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.config.load import load_experiment
from nemorl.errors import RunError
from nemorl.megatron.checkpoint_store import CheckpointStore
from nemorl.run.checkpoints import Progress
from nemorl.run.train import train
from tests.run.runs import lines, write_experiment


def test_nan_is_skipped_and_then_the_run_returns_to_a_checkpoint(folder: Path, model: Path) -> None:
    """NaN in the steps that versions 0, 3 and 4 sample for; versions after the return are others."""
    path = write_experiment(folder, model, "nan", checkpointing={"period": 1, "keep": 3})
    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    tree["policy"] |= {"max_skipped_steps": 1, "guards": {"max_rollbacks": 2}}
    function = "tests.run.losses:poisoned"
    tree["algorithm"]["loss"] = {"name": "custom", "function": function, "arguments": {"versions": [0, 3, 4]}}
    tree["algorithm"] |= {"validation": {}, "num_steps": 6}
    path.write_text(yaml.safe_dump(tree))
    train(load_experiment(path))
    run = folder / "nan"
    steps = lines(run)
    # Step 1 is skipped, and so is 4. The second in a row is step 5: back to 2, since 3 has the same weights.
    assert [line.step for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line.version for line in steps] == [1, 2, 7, 8, 9, 10]
    assert [line.values["updates/skipped"] for line in steps] == [1, 0, 0, 0, 0, 0]
    assert [line.values["guards/rollbacks"] for line in steps] == [0, 0, 1, 1, 1, 1]
    assert all(line.values["logprob_gap/max"] < 1e-4 for line in steps)  # engines have the restored weights
    store = CheckpointStore(run / "checkpoints")
    assert store.steps() == [4, 5, 6]
    # 4 groups in each of the steps 1 to 5 and again 3 to 6: none is sampled twice.
    progress = Progress.read(store.path(6))
    assert (progress.position, progress.rollbacks, progress.skipping_steps) == (36, 1, 0)
    assert json.loads((store.path(6) / "policy.json").read_text())["progress"]["updates"] == 5
    log = (run / "logs" / "driver.log").read_text()
    assert "policy skipped 2 optimizer steps in a row in stage 'training'" in log
    assert "continuing after step 2: 2 completed steps are discarded (3 to 4)" in log


def sft(folder: Path, model: Path, name: str, guards: dict[str, Any], answers: list[str]) -> Path:
    """Steps on 8 answers each, in the order of the file."""
    data = folder / f"{name}.jsonl"
    rows = [{"question": f"{n % 5}+{n % 4}=", "answer": answer} for n, answer in enumerate(answers)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = write_experiment(folder, model, name, checkpointing={"period": 2})
    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    tree["policy"] |= {"layout": {}, "max_skipped_steps": 1, "guards": guards}
    tree["policy"]["optimizer"] = {"name": "adam", "lr": 1e-2}
    train_on = {"name": "jsonl", "path": str(data), "prompt_key": "question", "answer_key": "answer"}
    tree["data"] = {"chat": False, "shuffle": False, "train": train_on}
    tree["algorithm"] = {"name": "sft", "num_steps": 10, "batch_size": 8}
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.slow
def test_sft_returns_from_answers_that_raise_its_loss(folder: Path, model: Path) -> None:
    """The answers of steps 7 to 9 are others; after the return from step 8 one such batch is left."""
    limits = {"loss": {"max_deviations": 3.0, "min_change": 0.5}, "warmup": 4, "window": 8}
    answers = ["07"] * 48 + ["=+"] * 24 + ["07"] * 40
    train(load_experiment(sft(folder, model, "spike", {**limits, "max_rollbacks": 1}, answers)))
    steps = lines(folder / "spike")
    assert [line.step for line in steps] == list(range(1, 11))
    # Back to step 4, whose checkpoint has 4 losses to compare with; step 5 has the data of step 9.
    skipped = [line.values["updates/skipped"] for line in steps]
    assert skipped == [line.values["guards/loss"] for line in steps] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert [line.values["epoch"] * len(answers) / 8 for line in steps] == pytest.approx(
        [1, 2, 3, 4, 9, 10, 11, 12, 13, 14]
    )
    assert steps[-1].values["loss/sft"] < steps[3].values["loss/sft"] < steps[4].values["loss/sft"] - 0.5


@pytest.mark.slow
def test_the_end_names_stage_quantity_value_and_limit(folder: Path, model: Path) -> None:
    guards = {"grad_norm": {"max_value": 1e-6}, "max_rollbacks": 1}
    with pytest.raises(RunError) as caught:
        train(load_experiment(sft(folder, model, "end", guards, ["07"] * 40)))
    message = (
        r"policy skipped 2 optimizer steps in a row in stage 'training' \(policy.max_skipped_steps is 1\)"
    )
    reason = r"of the last one grad_norm is [\d.]+, above guards.grad_norm.max_value, 1e-06"
    assert re.search(f"{message}; {reason}", str(caught.value))
    assert "there is no checkpoint of step 0 or before" in caught.value.__notes__[0]
