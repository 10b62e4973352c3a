"""Several environments in one run: each task has its own, with its own handling of errors and metrics."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nemorl.algorithms.metrics import rollout_metrics
from nemorl.config.environment import CustomEnvConfig
from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.data.tokenizer import Tokenizer
from nemorl.errors import ConfigError
from nemorl.generation.router import Replica, Router
from nemorl.plan.machine import read_machine
from nemorl.rollout.groups import Dropped, GroupAssignment, GroupSummary
from nemorl.rollout.worker import RolloutWorker
from nemorl.run.inspection import prepare
from nemorl.trajectories import Action, Step, Task
from tests.config.experiments import GRPO, refuses, write
from tests.data.tokenizers import ENDOFTEXT
from tests.rollout.stand_ins import EchoEngine
from tests.run.runs import tiny_model

SUMS = "{name: arithmetic, digits: 1, size: 10}"
TWO = [
    f"data.train={{name: mixture, sources: {{chain: {{dataset: {SUMS}}}, once: {{dataset: {SUMS}}}}}}}",
    "data.validation=null",
    "env={name: by_task, key: source}",
    "env.environments={chain: {name: chained_sums}, once: {name: single_turn}}",
]


class Broken:
    async def reset(self, task: Task) -> Any:
        raise RuntimeError("nothing works")

    async def step(self, action: Action) -> Step:
        return Step()

    async def close(self) -> None:
        pass


class BrokenFactory:
    reward_weights = {"broken": 1.0}  # noqa: RUF012  of a protocol

    def create(self) -> Broken:
        return Broken()

    async def close(self) -> None:
        pass


def experiment(folder: Path, model: Path, *overrides: str) -> Experiment:
    path = write(folder, GRPO.replace("models/arithmetic", str(model)))
    return load_experiment(path, ["algorithm.num_generations_per_prompt=2", *overrides])


def run_groups(config: Experiment, tokenizer: Tokenizer, tasks: list[int]) -> list[GroupSummary | Dropped]:
    """A group of each of these tasks, by a policy that answers 07 to everything."""
    engine = EchoEngine(lambda request: [*tokenizer.encode("07"), ENDOFTEXT])
    worker = RolloutWorker(config, Router([Replica("echo", engine.generate)]), store=lambda trajectories: 0)

    async def main() -> list[GroupSummary | Dropped]:
        assignments = [GroupAssignment(group=task, task_index=task, num_samples=2) for task in tasks]
        try:
            return [summary async for summary in worker.run_groups(assignments)]
        finally:
            await worker.close()

    return sorted(asyncio.run(main()), key=lambda one: one.group)


def test_each_task_has_its_environment(tmp_path: Path, model_folder: Path, tokenizer: Tokenizer) -> None:
    chained, once = run_groups(experiment(tmp_path, model_folder, *TWO), tokenizer, [0, 12])
    assert isinstance(chained, GroupSummary)
    assert isinstance(once, GroupSummary)
    assert (chained.environment, once.environment) == ("chain", "once")
    assert {t.num_turns for t in chained.trajectories} == {2}
    assert {t.num_turns for t in once.trajectories} == {1}
    assert {frozenset(t.rewards) for t in once.trajectories} == {frozenset({"exact_match"})}
    assert {"chained_sums", "chained_sums_turn"} <= chained.trajectories[0].rewards.keys()
    metrics = rollout_metrics([chained, once], 0)
    assert metrics["environment/chain/turns"] == 2
    assert metrics["environment/once/share"] == 0.5
    assert metrics["environment/once/reward"] == once.trajectories[0].reward


def test_errors_are_handled_by_the_section_of_the_environment(
    tmp_path: Path, model_folder: Path, tokenizer: Tokenizer
) -> None:
    here = "tests.rollout.test_by_task:BrokenFactory"
    broken = (
        f"env.environments.once={{name: custom, factory: '{here}', on_error: drop_group, max_retries: 0}}"
    )
    config = experiment(tmp_path, model_folder, *TWO, broken)
    kept, dropped = run_groups(config, tokenizer, [0, 12])
    assert isinstance(kept, GroupSummary)
    assert [t.error for t in kept.trajectories] == [None, None]
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "failed"


def test_every_task_names_an_environment(tmp_path: Path) -> None:
    path = write(tmp_path, GRPO.replace("models/arithmetic", str(tiny_model(tmp_path / "model"))))
    renamed = "env.environments={chain: {name: chained_sums}, other: {name: single_turn}}"
    with pytest.raises(ConfigError) as refused:
        prepare(path, [*TWO[:-1], renamed], read_machine(), where="unknown")
    (problem,) = refused.value.problems
    assert (problem.field, problem.value) == ("env.key", "source")
    fix = "the column `source` is 'once'; set it to one of env.environments: chain, other"
    assert problem.fix == f"task 10 of data.train: {fix}"


def test_a_reward_of_two_environments_has_one_weight(tmp_path: Path) -> None:
    two = "env={name: by_task, environments: {a: {name: math}, b: {name: math, weight: 2}}}"
    fix = "another environment gives `math` the weight 1; set the same"
    refuses(write(tmp_path), [two], "env.environments.b.weight", 2.0, fix)


def test_an_installed_package_offers_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "games-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: games\nVersion: 1.0\n", encoding="utf-8")
    path = "tests.rollout.test_by_task:BrokenFactory"
    (package / "entry_points.txt").write_text(f"[nemorl.environments]\nbroken = {path}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert CustomEnvConfig(name="custom", factory="broken").reward_weights == {"broken": 1.0}
