"""Whole runs that lose a rank of the policy, and continue from their newest checkpoint by themselves."""

import re
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.config.load import load_experiment
from nemorl.observe.metrics import read_samples
from nemorl.run.train import load_data, train
from nemorl.session.handles import ModelHandle, PolicySenders
from tests.run.faults import Faults
from tests.run.runs import lines, timeless, write_experiment

SETTINGS: dict[str, Any] = {"checkpointing": {"period": 2, "keep": 1, "save_hf": True}}
# Complete before the next step begins, so that a fault in a later one never meets a checkpoint being written.
AT_ONCE: dict[str, Any] = {"checkpointing": {**SETTINGS["checkpointing"], "asynchronous": False}}


@pytest.fixture(scope="module")
def undisturbed(folder: Path, model: Path) -> Path:
    train(load_experiment(write_experiment(folder, model, "undisturbed", **SETTINGS)))
    return folder / "undisturbed"


def driver_log(run: Path) -> str:
    return (run / "logs" / "driver.log").read_text()


def at(log: str, text: str) -> datetime:
    """Time of the first line with this text."""
    line = next(line for line in log.splitlines() if text in line)
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")


def assert_same_to_the_bit(run: Path, other: Path) -> None:
    for ours, theirs in zip(lines(run), lines(other), strict=True):
        assert timeless(ours) == timeless(theirs), f"step {ours.step}"
    file = Path("hf") / "model.safetensors"
    assert (run / file).read_bytes() == (other / file).read_bytes()


def test_a_rank_is_killed_in_training_and_in_a_weight_update(
    folder: Path, model: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "killed"
    faults = Faults(run, monkeypatch)
    faults.at(ModelHandle, "train", 4)  # in step 4, after the checkpoint of step 2
    faults.at(PolicySenders, "send", 6)  # in step 4 again: of 3 steps, of the restored weights and of step 3
    train(load_experiment(write_experiment(folder, model, "killed", **AT_ONCE)))
    assert faults.sent == ["train", "send"]
    assert_same_to_the_bit(run, undisturbed)
    text = driver_log(run)
    assert text.count("policy lost in step 4, restarting: policy rank 1 died in stage 'training'") == 1
    assert text.count("continuing after step 2: 1 completed steps are discarded (3 to 3)") == 2
    assert [line.values["models/restarts"] for line in lines(run)] == [0, 0, 2, 2, 2, 2]
    # 3 and 4 were discarded, 5 are the restored weights, 6 those of step 3; and the same once more.
    assert [line.version for line in lines(run)] == [1, 2, 9, 10, 11, 12]


@pytest.mark.slow
def test_a_rank_is_killed_in_a_checkpoint_and_one_hangs(
    folder: Path, model: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "hung"
    faults = Faults(run, monkeypatch)
    faults.at(ModelHandle, "write_copy", 1)  # of step 2: there is no checkpoint yet
    faults.at(ModelHandle, "train", 6, signal.SIGSTOP)
    cluster = {"deadlines": {"health": 10.0}}  # far shorter than the time for training
    train(load_experiment(write_experiment(folder, model, "hung", **SETTINGS, cluster=cluster)))
    assert faults.sent == ["write_copy", "train"]
    assert_same_to_the_bit(run, undisturbed)
    text = driver_log(run)
    assert "the checkpoint of step 2 was not completed" in text
    assert re.search(r"continuing after step 0: \d completed steps are discarded", text)
    problem = "policy hangs in stage 'training': no response from rank 1 in 10 s"
    stopped, noticed = (at(text, line) for line in ("before call 6 of ModelHandle.train", problem))
    assert (noticed - stopped).total_seconds() < 2 * 10.0 + 6.0 + 4.0  # two periods, the stall report


@pytest.mark.slow
def test_samples_of_other_weights_outlive_a_restart(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "ahead"
    faults = Faults(run, monkeypatch)
    faults.at(ModelHandle, "train", 4)
    ahead = {"max_staleness": 2, "validation": {"period": None}}
    experiment = load_experiment(write_experiment(folder, model, "ahead", **AT_ONCE, algorithm=ahead))
    train(experiment)
    steps = lines(run)
    assert [line.step for line in steps] == [1, 2, 3, 4, 5, 6]
    # The versions of step 3 and of the step that was lost are not used again.
    assert [line.version for line in steps] == [1, 2, 6, 7, 8, 9]
    assert all(line.values["version/lag_max"] <= 2 for line in steps)
    # Groups 16 to 19 began with the weights of step 2, and 20 to 23 with those of step 3, now discarded.
    # What has no token of step 3 is kept, and trained on first.
    discarded = sum(line.values["dropped/discarded"] for line in steps)
    assert 4 <= discarded <= 8
    order = load_data(experiment).order
    ahead_of_time = {order.task_index(group) for group in range(16, 24)}
    samples = [sample for sample in read_samples(run / "samples.jsonl") if sample.step == 3]
    assert len({sample.task for sample in samples} & ahead_of_time) == 8 - discarded
    assert [line.values["models/restarts"] for line in steps] == [0, 0, 1, 1, 1, 1]


@pytest.mark.slow
def test_sft_continues_too(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sft = {"name": "sft", "num_steps": 4, "batch_size": 8, "validation": {"at_end": True}}
    losses = []
    for name, kill in (("sft", False), ("sft-killed", True)):
        if kill:
            Faults(folder / name, monkeypatch).at(ModelHandle, "train", 4)
        path = write_experiment(folder, model, name, checkpointing={"period": 2})
        tree = yaml.safe_load(path.read_text()) | {"algorithm": sft}
        path.write_text(yaml.safe_dump(tree))
        train(load_experiment(path))
        losses.append([timeless(line) for line in lines(folder / name)])
    assert losses[0] == losses[1]
    assert "policy restarted in" in driver_log(folder / "sft-killed")
