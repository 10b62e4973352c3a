"""Environments of verifiers, whose agents call the policy's endpoint."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from nemorl.config.algorithm import OnlineConfig
from nemorl.config.data import DataConfig
from nemorl.config.experiment import Experiment
from nemorl.config.generation import TorchGenerationConfig
from nemorl.config.library_datasets import VerifiersDataset
from nemorl.config.library_environments import VerifiersEnvConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.datasets import DatasetError, load_tasks
from nemorl.data.tokenizer import load_tokenizer
from nemorl.generation.router import Replica, Router
from nemorl.rollout.groups import GroupAssignment, GroupSummary
from nemorl.rollout.worker import RolloutWorker
from nemorl.trajectories import StopReason, Trajectory
from tests.data.tokenizers import IM_END, save_tokenizer
from tests.environments.episodes import task
from tests.rollout.stand_ins import EchoEngine

pytest.importorskip("verifiers.v1")


@pytest.fixture(autouse=True)
def _the_task_set_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def dataset(**fields) -> VerifiersDataset:
    return VerifiersDataset(**{"name": "verifiers", "taskset": "verifiers-sums", **fields})


def environment(**fields) -> VerifiersEnvConfig:
    local = {"agent": {"runtime": {"type": "subprocess"}}}
    return VerifiersEnvConfig(name="verifiers", environment=local, **fields)


def sample(
    folder: Path, env: VerifiersEnvConfig, num_samples: int, *answers: str
) -> tuple[GroupSummary, list[Trajectory]]:
    """A group of the first task, whose calls of the model have these answers."""
    save_tokenizer(folder)
    tokenizer = load_tokenizer(PolicyConfig(model_path=folder))
    left = list(answers)
    engine = EchoEngine(lambda request: [*tokenizer.encode(left.pop(0)), IM_END])
    counts = {"num_steps": 1, "num_prompts_per_step": 1, "num_generations_per_prompt": 2}
    experiment = Experiment(
        run_dir=Path("unused"),
        policy=PolicyConfig(model_path=folder, max_sequence_length=512),
        generation=TorchGenerationConfig(max_new_tokens=60),
        data=DataConfig(train=dataset()),
        env=env,
        algorithm=OnlineConfig.model_validate({"name": "grpo", **counts}),
    )

    async def main() -> GroupSummary:
        worker = RolloutWorker(experiment, Router([Replica("engine", engine.generate)]), store=list)
        try:
            (group,) = [one async for one in worker.run_groups([GroupAssignment(0, 0, num_samples)])]
        finally:
            await worker.close()
        assert isinstance(group, GroupSummary)
        return group

    group = asyncio.run(asyncio.wait_for(main(), 120))
    return group, list(group.reference)


def test_calls_of_an_agent_train_with_the_rewards_of_its_trace(tmp_path):
    _, (trajectory,) = sample(tmp_path, environment(scores=("right", "characters")), 1, "2", "1")
    assert trajectory.error is None
    sampled = trajectory.tokens[trajectory.loss_mask]
    tokenizer = load_tokenizer(PolicyConfig(model_path=tmp_path))
    assert tokenizer.decode(sampled) == "2<|im_end|>1<|im_end|>"
    np.testing.assert_allclose(trajectory.logprobs[trajectory.loss_mask], -sampled / 1000, rtol=1e-6)
    assert [turn.stop for turn in trajectory.turns] == [StopReason.STOP] * 2
    text = tokenizer.decode(trajectory.tokens)
    assert text.index("Sums.") < text.index("0+1?") < text.index("Sure?")
    # 0+1 is 1: the reward `right` of 1 with its weight, 0.5; one character.
    assert trajectory.rewards == {"right": 1.0, "characters": 1.0, "verifiers": 0.5}
    assert trajectory.reward == 0.5
    assert not [name for name in os.environ if name.startswith("NEMORL_API_KEY")]


def test_a_wrong_answer_has_no_reward(tmp_path):
    _, (trajectory,) = sample(tmp_path, environment(), 1, "1", "12")
    assert trajectory.rewards == {"verifiers": 0.0}


def test_an_episode_that_fails_says_why(tmp_path):
    env = environment(max_retries=0)
    _, (trajectory,) = sample(tmp_path, env, 1, "raise", "1")
    assert "VerifiersFailed" in (trajectory.error or "")
    assert "the agent fell over" in (trajectory.error or "")


def test_tasks_are_those_of_the_task_set():
    given = load_tasks(dataset(options={"number": 5}, offset=3), DataConfig(train=dataset()))
    assert [each.messages[0].content for each in given] == ["3+1?", "4+1?"]
    assert given[1].columns["verifiers_data"]["answer"] == "5"
    assert given[1].columns["verifiers_taskset"] == {"id": "verifiers-sums", "number": 5}
    data = DataConfig(train=dataset())
    with pytest.raises(DatasetError, match="offset and size ask for 9 tasks of 4"):
        load_tasks(dataset(size=9), data)
    with pytest.raises(DatasetError, match="no_such_set"):
        load_tasks(dataset(taskset="no-such-set"), data)
    with pytest.raises(DatasetError, match="numbers"):
        load_tasks(dataset(options={"numbers": 5}), data)


def test_tasks_of_another_dataset_are_refused():
    async def main() -> None:
        with pytest.raises(ValueError, match="task 0 is not of verifiers"):
            await environment().make_factory().create().run(task("7"), None)

    asyncio.run(main())
