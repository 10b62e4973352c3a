"""The best and the worst of a group, and learning from them, with groups that were drawn here."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemorl.algorithms.best_of_n import BestOfNUpdate, best_of, pairs_of
from nemorl.algorithms.metrics import LogprobGapTooLarge, LogprobGate, optimizer_metrics
from nemorl.algorithms.online import OnlineAlgorithm
from nemorl.config.facts import metric_names
from nemorl.config.load import load_experiment
from nemorl.models.create import create_tiny_model
from nemorl.rollout.groups import GroupSummary, summarize
from nemorl.session.session import Session
from nemorl.trajectories import StopReason, Trajectory
from tests.algorithms.groups import group, trajectory
from tests.algorithms.local_session import LocalLearner, Stored, no_stage, start_host
from tests.config.experiments import write


def test_the_best_and_the_worst_of_each_group_are_a_pair() -> None:
    groups = [
        group(0, trajectory(0.5, 0), trajectory(1.0, 1), trajectory(1.0, 2), trajectory(-1.0, 3)),
        group(1, trajectory(0.5, 0), trajectory(0.5, 1)),  # with equal rewards
        group(2, trajectory(9.0, 0, trains=False), trajectory(0.2, 1), trajectory(0.1, 2)),
    ]
    pairs = pairs_of(groups)
    assert [(p.group.group, p.chosen.row, p.rejected and p.rejected.row) for p in pairs] == [
        (0, 1, 3),
        (2, 1, 2),
    ]


def test_the_best_of_each_group_is_imitated_if_it_is_good_enough() -> None:
    groups = [
        group(0, trajectory(0.5, 0), trajectory(1.0, 1)),
        group(1, trajectory(0.5, 0), trajectory(0.5, 1)),
        group(2, trajectory(9.0, 0, trains=False)),
    ]
    assert [(p.group.group, p.chosen.row) for p in best_of(groups)] == [(0, 1), (1, 0)]
    assert [(p.group.group, p.chosen.row) for p in best_of(groups, 0.6)] == [(0, 1)]


EXPERIMENT = """\
run_dir: {folder}/run
policy:
  model_path: {folder}/model
  precision: float32
  max_sequence_length: 16
  micro_batch_tokens: 64
  optimizer: {{name: adam, lr: 1e-2}}
generation: {{max_new_tokens: 6}}
data:
  chat: false
  train: {{name: arithmetic, digits: 1, size: 12}}
rewards: [{{function: exact_match}}]
algorithm:
  num_steps: 1
  num_prompts_per_step: 6
  num_generations_per_prompt: 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("picking")
    create_tiny_model(folder / "model", hidden=32, ffn=64, layers=2, heads=4, kv_heads=2)
    return folder


def sampled(seed: int) -> list[GroupSummary]:
    """Six groups of four: the fuller of threes a sample is, the better; one group has equal rewards."""
    drawn = np.random.default_rng(seed)
    groups = []
    for number in range(6):
        prompt = drawn.integers(2, 12, 4)
        members = []
        for _ in range(4):
            answer = drawn.integers(2, 8, drawn.integers(2, 5))
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            mask = np.arange(len(tokens)) >= 4
            reward = 0.0 if number == 5 else float((answer == 3).mean())
            members.append(
                Trajectory(
                    tokens, mask, -mask.astype(np.float32), np.where(mask, 0, -1).astype(np.int32),
                    (), {"own": reward}, reward, StopReason.STOP, number, number,
                )
            )  # fmt: skip
        summaries = tuple(summarize([t], row) for row, t in enumerate(members))
        groups.append(GroupSummary(number, number, Stored(members), summaries))
    return groups


@pytest.mark.parametrize("method", ["iterative_dpo", "rejection_sampling"])
def test_what_was_picked_is_learned(folder: Path, method: str) -> None:
    experiment = load_experiment(
        write(folder, EXPERIMENT.format(folder=folder)), [f"algorithm.name={method}"]
    )
    config: Any = experiment.algorithm
    rendezvous = folder / method
    rendezvous.mkdir()
    host = start_host(experiment, rendezvous)
    learner = LocalLearner(host, experiment.policy.micro_batch_tokens)
    models: Any = {"policy": learner}
    session = Session(models=models)
    observer: Any = SimpleNamespace(stage=no_stage)
    nobody: Any = None
    generation = experiment.generation
    gate = LogprobGate(config.model_copy(update={"max_logprob_gap": 9.0}), generation)
    update = BestOfNUpdate(config, multiple=4)
    groups = sampled(3)

    def train(gate: LogprobGate, number: int) -> dict[str, float]:
        algorithm = OnlineAlgorithm(config, session, nobody, update, gate, observer, nobody)
        return asyncio.run(algorithm.train(update.prepare(groups, number), number))

    lines = [train(gate, 1) for _ in range(8)]
    with pytest.raises(LogprobGapTooLarge, match=r"max_logprob_gap allows a mean of 0.2"):
        train(LogprobGate(config, generation), 1)
    host.close()
    first, last = lines[0], lines[-1]
    # An engine that says -1 of each of 15 tokens is not the policy: only the first batch shows it.
    assert first["logprob_gap/max"] > first["logprob_gap/mean"] > 1
    assert not any("logprob_gap/mean" in line for line in lines[1:])
    if method == "iterative_dpo":
        assert first["picked"] == 5 / 6
        assert first["rewards/margin"] == pytest.approx(0, abs=1e-5)  # the reference is the first policy
        assert last["rewards/margin"] > 0.5
        assert last["rewards/accuracy"] == 1
    else:
        assert first["picked"] == 1
        assert last["loss/sft"] < 0.7 * first["loss/sft"]
    known = metric_names(config, experiment.env, experiment.rewards)
    assert {name for line in lines for name in line} <= known


def test_a_batch_without_a_pair_changes_nothing() -> None:
    config: Any = SimpleNamespace(num_epochs=1, min_reward=5.0)
    nobody: Any = None
    gate = LogprobGate(config, nobody)
    update = BestOfNUpdate(config, multiple=2)
    algorithm = OnlineAlgorithm(config, nobody, nobody, update, gate, nobody, nobody)
    batch = update.prepare([group(0, trajectory(0.5, 0), trajectory(1.0, 1))], 1)
    assert asyncio.run(algorithm.train(batch, 1)) == {"picked": 0.0} | optimizer_metrics([], left_out=1)
    assert not gate.compared
