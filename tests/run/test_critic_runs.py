"""PPO from the command line: a critic of another layout than the policy's, and a reference of its own."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.config.facts import metric_names
from nemorl.config.load import load_experiment
from nemorl.megatron.checkpoint_store import FileRecord, Manifest, verify
from nemorl.observe.metrics import StepMetrics
from nemorl.run.memory import FOLDERS
from nemorl.run.train import train
from nemorl.session.handles import ModelHandle
from tests.run.faults import Faults, processes
from tests.run.runs import assert_same_run, finish, lines, start, tiny_model, write_experiment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("critics")


def ppo(folder: Path, name: str, num_steps: int, **sections: object) -> Path:
    """A critic under TP2 next to a policy under DP2; in the first step the critic learns alone."""
    model = folder / "model"
    path = write_experiment(folder, model if model.exists() else tiny_model(model), name)
    tree = yaml.safe_load(path.read_text())
    tree["policy"]["layout"] = {"data_parallel_size": 2}
    tree["critic"] = {
        "layout": {"tensor_parallel_size": 2},
        "optimizer": {"name": "adam", "lr": 1e-2},
    }
    tree["algorithm"] |= {
        "name": "ppo",
        "num_steps": num_steps,
        "num_minibatches": 2,
        "num_epochs": 2,
        "critic": {"warmup_steps": 1},
        "validation": {},
    }
    for section, fields in sections.items():
        tree[section] = tree.get(section, {}) | fields  # type: ignore[operator]
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def run(path: Path, *arguments: str) -> list[StepMetrics]:
    status, output = finish(start("train", path, *arguments))
    assert status == 0, output
    return lines(path.with_suffix(""))


PARTS = {"likelihood": {"coefficient": 0.1, "min_reward": 0.0}, "loss": {"top_entropy_quantile": 0.5}}


@pytest.fixture(scope="module")
def apart(folder: Path) -> Path:
    path = ppo(folder, "apart", 3, reference={}, checkpointing={"period": 3}, algorithm=PARTS)
    run(path)
    return path


def test_a_critic_learns_next_to_the_policy_and_lies_in_its_checkpoints(apart: Path) -> None:
    path = apart
    alone, *later = lines(path.with_suffix(""))
    # Warm-up: the critic learns from a policy that stays as it is.
    assert "grad_norm" not in alone.values
    assert alone.values["critic/grad_norm"] > 0
    assert alone.values["critic/value"] == 0  # a head of zeros expects nothing
    assert alone.values["kl/penalty"] == pytest.approx(0, abs=1e-5)  # the reference is what samples
    assert [step.values["kl/penalty"] for step in later] == pytest.approx([0, 0], abs=0.1)
    assert later[0].values["kl/penalty"] == pytest.approx(0, abs=1e-5)  # nor has the policy learned before it
    assert abs(later[1].values["kl/penalty"]) > 1e-5
    assert all(step.values["critic/value"] != 0 for step in later)
    assert all(step.values["grad_norm"] > 0 for step in later)
    assert max(step.values["logprob_gap/max"] for step in later) < 1e-4
    assert all(step.values["loss/likelihood"] > 1 for step in later)  # nats of a model that knows nothing yet
    assert all(0.5 <= step.values["top_entropy_fraction"] < 0.6 for step in later)
    # A forward pass each before the update, over the same tokens; the critic's head is one number.
    for step in later:
        assert step.values["flops/reference"] == pytest.approx(step.values["flops/logprobs"])
        assert 0 < step.values["flops/values"] < step.values["flops/logprobs"] < step.values["flops/training"]
        assert all(step.values[f"tflops/{name}"] > 0 for name in ("logprobs", "reference", "values"))
    experiment = load_experiment(path)
    known = metric_names(experiment.algorithm, experiment.env, experiment.rewards)
    assert {name for step in (alone, *later) for name in step.values} <= known
    checkpoint = path.with_suffix("") / "checkpoints" / "step_00000003"
    files = {file.path for file in verify(checkpoint).files}
    assert {"weight_00000.safetensors", "critic/weight_00000.safetensors"} <= files


@pytest.mark.slow
def test_a_lost_critic_returns_with_the_policy_and_a_lost_reference_alone(
    folder: Path, apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(folder / "lost", monkeypatch)
    # Four updates of the critic in a step: in the second of step 2, after the checkpoint of step 1.
    faults.at(ModelHandle, "train", 6, process="critic-1", group="critic")
    faults.at(ModelHandle, "logprobs", 3, process="reference-0", group="reference")  # of step 2 again
    path = ppo(folder, "lost", 3, reference={}, checkpointing={"period": 1, "keep": 1}, algorithm=PARTS)
    train(load_experiment(path))
    assert sorted(faults.sent) == ["logprobs", "train"]
    assert_same_run(lines(folder / "lost"), lines(apart.with_suffix("")))
    text = (folder / "lost" / "logs" / "driver.log").read_text()
    assert text.count("critic lost in step 2, restarting: critic rank 1 died in stage 'training'") == 1
    assert text.count("reference lost, restarting: reference rank 0 died in stage 'logprobs'") == 1
    started = {
        name: len(processes(folder / "lost", f"{name}-1")) for name in ("policy", "critic", "reference")
    }
    assert started == {"policy": 2, "critic": 2, "reference": 2}


@pytest.mark.slow
def test_a_run_with_a_critic_on_the_policys_devices_continues_as_it_would_have(folder: Path) -> None:
    away = {"offload": {"weights": True, "optimizer": True}}
    sections = {"policy": away, "critic": {**away, "devices": "policy"}}
    whole = run(ppo(folder, "whole", 4, **sections))
    run(ppo(folder, "halves", 2, **sections))
    resumed = run(ppo(folder, "halves", 4, **sections), "--resume")
    assert_same_run(resumed, whole)


def states(run: Path, step: int) -> tuple[FileRecord, ...]:
    """The files of a checkpoint with their checksums."""
    return Manifest.read(run / "checkpoints" / f"step_{step:08d}").files


@pytest.mark.slow
def test_a_killed_run_continues_from_memory_bit_for_bit(tmp_path: Path) -> None:
    """Policy and critic of two ranks each; the disk has no checkpoint before the last step."""
    memory = tmp_path / "memory"
    memory.mkdir()
    one: dict[str, Any] = {"cluster": {"policy_threads": 1}, "generation": {"threads": 1}}
    kept = {"period": 100, "memory_period": 1, "memory_dir": str(memory)}
    whole = ppo(tmp_path, "whole", 4, checkpointing={"period": 100}, **one)
    status, output = finish(start("train", whole))
    assert status == 0, output
    killed = ppo(tmp_path, "killed", 4, checkpointing=kept, **one)
    driver = start("train", killed)
    while not list(memory.glob(f"{FOLDERS}*/step_*")):
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.02)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    (left,) = memory.glob(f"{FOLDERS}*/step_*")
    assert not list((tmp_path / "killed" / "checkpoints").glob("step_*"))
    status, output = finish(start("train", killed, "--resume"))
    assert status == 0, output
    assert f"continuing from the state of step {int(left.name[5:])} in {left.parent}" in output
    header = json.loads((tmp_path / "killed" / "header.json").read_text())
    assert header[-1]["resumed_step"] == int(left.name[5:])
    assert_same_run(lines(tmp_path / "killed"), lines(tmp_path / "whole"))
    ours, its = states(tmp_path / "killed", 4), states(tmp_path / "whole", 4)
    assert len(ours) > 12
    assert ours == its
    assert list(memory.iterdir()) == []
