"""Reward models learn what is better, on separable data, and transformers scores them the same."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from nemorl.algorithms.offline import objective_of
from nemorl.config.algorithm import RewardModelConfig
from nemorl.config.experiment import Experiment
from nemorl.config.facts import metric_names
from nemorl.config.load import load_experiment
from nemorl.models.create import create_tiny_model
from tests.algorithms.local_session import Run, start_host
from tests.config.experiments import write

EXPERIMENT = """\
run_dir: {folder}/run
policy:
  model_path: {folder}/model
  head: scalar
  precision: float32
  max_sequence_length: 16
  micro_batch_tokens: 256
  optimizer: {{name: adam, lr: 5e-3}}
data:
  chat: false
  train: {{name: {kind}, path: {folder}/{kind}_train.jsonl}}
  validation: {{name: {kind}, path: {folder}/{kind}_validation.jsonl}}
checkpointing: {{enabled: false}}
algorithm:
  name: reward_model
  num_steps: 60
  batch_size: 16
  validation: {{at_start: true, at_end: true}}
"""


def separable_pairs(file: Path, count: int, seed: int) -> None:
    """Answers with a 7 are better than answers without."""
    draws = random.Random(seed)

    def answer(digits: str) -> str:
        return "".join(draws.choice(digits) for _ in range(3))

    lines = []
    for _ in range(count):
        place, chosen = draws.randrange(3), list(answer("0123456789"))
        chosen[place] = "7"
        prompt = f"{draws.randrange(10)}+{draws.randrange(10)}="
        row = {"prompt": prompt, "chosen": "".join(chosen), "rejected": answer("012345689")}
        lines.append(json.dumps(row))
    file.write_text("\n".join(lines))


def judged_steps(file: Path, count: int, seed: int) -> None:
    """A step is right while no 7 has been written."""
    draws = random.Random(seed)
    lines = []
    for _ in range(count):
        steps = [str(draws.randrange(10)) for _ in range(3)]
        labels = ["7" not in steps[: end + 1] for end in range(3)]
        lines.append(json.dumps({"prompt": "1+1=", "completions": steps, "labels": labels}))
    file.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_models")
    create_tiny_model(folder / "model", hidden=32, ffn=64, layers=2, heads=4, kv_heads=2)
    for part, (count, seed) in {"train": (400, 1), "validation": (60, 2)}.items():
        separable_pairs(folder / f"preference_{part}.jsonl", count, seed)
        judged_steps(folder / f"steps_{part}.jsonl", count, seed)
    return folder


def experiment_of(folder: Path, kind: str, *overrides: str) -> Experiment:
    return load_experiment(write(folder, EXPERIMENT.format(folder=folder, kind=kind)), overrides)


@pytest.fixture(scope="module")
def host(folder):
    host = start_host(experiment_of(folder, "preference"), folder)
    yield host
    host.close()


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("preference", "{name: bradley_terry, center_coefficient: 0.01}"),
        ("preference", "{name: log_exp}"),
        ("steps", "{name: process}"),
    ],
)
def test_held_out_data_are_separated(folder, host, kind, loss):
    # The model has no character for a line break.
    apart = [f"data.{part}.separator=''" for part in ("train", "validation")] if kind == "steps" else []
    experiment = experiment_of(folder, kind, f"algorithm.loss={loss}", *apart)
    lines = asyncio.run(Run(experiment, host).run())
    before, after = lines[0], lines[-1]
    assert before["validation/accuracy"] == 0  # a fresh head says the same of all
    assert after["validation/accuracy"] >= 0.9
    assert after["validation/loss"] < 0.5 * before["validation/loss"]
    known = metric_names(experiment.algorithm, experiment.env, experiment.rewards)
    assert {name for line in lines for name in line} <= known


@pytest.mark.parametrize(("compared", "means"), [(4, {"accuracy": 0.75, "score/margin": 0.5}), (0, {})])
def test_nothing_is_scored_correctly_where_every_step_is_even(compared: int, means: dict[str, float]) -> None:
    config = RewardModelConfig(name="reward_model", num_steps=1, batch_size=1)
    sums = {"loss/total": 2.5, "compared": compared, "accuracy": 3, "score/margin": 2}
    assert objective_of(config).metrics(sums, {}) == {"loss/total": 2.5, **means}
