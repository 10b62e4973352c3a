"""Every method that learns from given data, in the loop that runs them, without Ray."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from nemorl.algorithms.offline import FILE, OfflineData, ReferenceSums
from nemorl.config.algorithm.pair_losses import PREFERENCE_PRESETS
from nemorl.config.experiment import Experiment
from nemorl.config.facts import metric_names
from nemorl.config.load import load_experiment
from nemorl.models.create import create_tiny_model
from nemorl.rollout.order import TaskOrder
from tests.algorithms.local_session import Run, start_host
from tests.config.experiments import write

EXPERIMENT = """\
run_dir: {folder}/run
policy:
  model_path: {folder}/model
  precision: float32
  max_sequence_length: 16
  micro_batch_tokens: 96
  optimizer: {{name: adam, lr: 1e-2}}
data:
  chat: false
  train: {{name: arithmetic, digits: 1, size: 12, offset: 20}}
  validation: {{name: arithmetic, digits: 1, size: 5}}
checkpointing: {{enabled: false}}
algorithm:
  num_steps: 10
  batch_size: 12
  validation: {{at_end: true}}
"""
METHODS = [*PREFERENCE_PRESETS, "kto"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    create_tiny_model(folder / "model", hidden=32, ffn=64, layers=2, heads=4, kv_heads=2)
    (folder / "run").mkdir()
    return folder


def experiment_of(folder: Path, *overrides: str) -> Experiment:
    return load_experiment(write(folder, EXPERIMENT.format(folder=folder)), overrides)


@pytest.fixture(scope="module")
def host(folder):
    host = start_host(experiment_of(folder, "algorithm.name=dpo"), folder)
    yield host
    host.close()


def learn(folder: Path, host, *overrides: str) -> tuple[Run, list[dict[str, float]]]:
    run = Run(experiment_of(folder, *overrides), host)
    return run, asyncio.run(run.run())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_distinguishes_better_answers_from_worse(folder, host, method):
    run, lines = learn(folder, host, f"algorithm.name={method}")
    first, last = lines[0], lines[-1]
    loss = "loss/preference" if method == "kto" else "loss/total"
    assert last[loss] < 0.9 * first[loss]
    assert last["rewards/margin"] > first["rewards/margin"] + 0.05
    assert last["rewards/accuracy"] >= 0.9
    assert last["epoch"] == 10
    assert last["validation/loss"] > 0
    algorithm = run.experiment.algorithm
    known = metric_names(algorithm, run.experiment.env, run.experiment.rewards)
    assert {name for line in lines for name in line} <= known


def test_a_live_reference_is_the_precomputed_one(folder, host):
    """And a second run reads the sums of the first, whatever the policy has become."""
    (folder / "run" / FILE).unlink(missing_ok=True)
    run, precomputed = learn(folder, host, "algorithm.name=dpo")
    assert run.learner.forwards == 1
    kept = json.loads((folder / "run" / FILE).read_text())
    assert len(kept["sums"]) == 2 * (12 + 5)
    again, once_more = learn(folder, host, "algorithm.name=dpo")
    assert again.learner.forwards == 0
    _, live = learn(folder, host, "algorithm.name=dpo", "algorithm.reference=live")
    # The host's optimizer has steps behind it, so what comes before its first step alone is the same.
    for name in ("loss/total", "rewards/margin", "logprobs/chosen", "logprobs/rejected"):
        assert precomputed[0][name] == pytest.approx(live[0][name], abs=1e-5)
        assert precomputed[0][name] == once_more[0][name]
    assert abs(live[0]["rewards/margin"]) < 1e-5  # before anything is learned


class Moved(Run):
    """A policy that is no longer the reference when its first step comes."""

    async def references(self, data: OfflineData, order: TaskOrder) -> ReferenceSums:
        found = await super().references(data, order)
        noise = torch.Generator().manual_seed(0)
        for parameter in self.learner.host.parameters().values():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=noise)
        return found


def test_a_live_reference_of_single_answers_is_the_precomputed_one(folder, host):
    """Also of the answers to other prompts, which are others in each epoch and in a validation."""
    first = {}
    for reference in ("precomputed", "live"):
        changes = ("algorithm.name=kto", f"algorithm.reference={reference}", "algorithm.num_steps=2")
        (first[reference], *_) = asyncio.run(Moved(experiment_of(folder, *changes), host).run())
    assert abs(first["live"]["kl/reference"]) > 0.01
    for name in ("kl/reference", "loss/preference", "rewards/desirable", "rewards/undesirable"):
        assert first["precomputed"][name] == pytest.approx(first["live"][name], rel=1e-3)


def test_micro_batches_do_not_show(folder, host):
    _, coarse = learn(folder, host, "algorithm.name=ipo", "algorithm.num_steps=1")
    _, fine = learn(
        folder, host, "algorithm.name=ipo", "algorithm.num_steps=1", "policy.micro_batch_tokens=32"
    )
    assert fine[0]["packing/micro_batches"] > coarse[0]["packing/micro_batches"]
    for name in ("loss/total", "grad_norm"):
        assert fine[0][name] == pytest.approx(coarse[0][name], rel=1e-4)
    # Of a policy that is its own reference: what rounding leaves, whose sign the accuracy would count.
    assert fine[0]["rewards/margin"] == pytest.approx(coarse[0]["rewards/margin"], abs=1e-5)


def test_kto_starts_from_no_divergence(folder, host):
    _, lines = learn(folder, host, "algorithm.name=kto")
    assert lines[0]["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl/reference"] != 0
    assert 0.3 < lines[0]["examples/desirable"] < 0.7


def test_sft_measures_the_loss_of_held_out_answers(folder, host):
    _, lines = learn(
        folder, host, "algorithm.name=sft", "algorithm.validation={at_end: true, generate: false}"
    )
    assert lines[-1]["loss/sft"] < 0.8 * lines[0]["loss/sft"]
    assert lines[-1]["validation/loss"] == pytest.approx(lines[-1]["validation/nll"])
