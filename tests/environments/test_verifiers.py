"""Environments of verifiers, whose agents call the policy's endpoint."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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
from nemorl.plan.addresses import server_problems
from nemorl.rollout.groups import GroupAssignment, GroupSummary
from nemorl.rollout.worker import RolloutWorker
from nemorl.trajectories import EnvironmentLost, StopReason, Task, Trajectory
from tests.data.tokenizers import IM_END, save_tokenizer
from tests.environments.episodes import task
from tests.environments.servers import end, free_port, running
from tests.required import require_module
from tests.rollout.stand_ins import EchoEngine

require_module("verifiers.v1")
verifiers = require_module("nemorl.environments.verifiers")
SERVER = Path(__file__).with_name("verifiers_server.py")


@pytest.fixture(autouse=True)
def _the_task_set_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def dataset(**fields) -> VerifiersDataset:
    return VerifiersDataset(**{"name": "verifiers", "taskset": "verifiers-sums", **fields})


def environment(**fields) -> VerifiersEnvConfig:
    local = {"environment": {"agent": {"runtime": {"type": "subprocess"}}}} if "url" not in fields else {}
    return VerifiersEnvConfig(name="verifiers", **local, **fields)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the library's environment server, which has the settings of `environment`."""
    port = free_port()
    url, command = f"tcp://127.0.0.1:{port}", [sys.executable, str(SERVER), str(port)]
    with running(command, tmp_path_factory.mktemp("verifiers"), url):
        yield url


@pytest.fixture(params=["in the worker", "behind its server"])
def place(request: pytest.FixtureRequest) -> dict[str, str]:
    """Fields of the environment that say where it runs."""
    return {"url": request.getfixturevalue("server")} if request.param == "behind its server" else {}


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


def test_calls_of_an_agent_train_with_the_rewards_of_its_trace(tmp_path, place):
    env = environment(scores=("right", "characters"), **place)
    _, (trajectory,) = sample(tmp_path, env, 1, "2", "1")
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


def test_a_wrong_answer_has_no_reward(tmp_path):
    _, (trajectory,) = sample(tmp_path, environment(), 1, "1", "12")
    assert trajectory.rewards == {"verifiers": 0.0}


def test_an_episode_that_fails_says_why(tmp_path, place):
    env = environment(max_retries=0, **place)
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


class SilentModel:
    """A `Model` that answers no call, so that an episode lasts."""

    name, api_key = "policy", "key"

    def __init__(self) -> None:
        self.called, self.left = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> "SilentModel":
        self._listener = await asyncio.start_server(self._listen, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.called.set()
        while await reader.read(1000):
            pass
        self.left.set()
        writer.close()


def test_a_server_that_is_gone_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(verifiers, "_ANSWER_SECONDS", 0.5)
    port = free_port()
    url, command = f"tcp://127.0.0.1:{port}", [sys.executable, str(SERVER), str(port)]
    (first, *_) = load_tasks(dataset(), DataConfig(train=dataset()))

    async def main() -> None:
        factory = environment(url=url).make_factory()
        try:
            async with SilentModel() as model:
                with pytest.raises(EnvironmentLost, match=f"{url} does not answer within 0.5 s"):
                    await factory.create().run(first, model)
                with running(command, tmp_path, url) as process:
                    monkeypatch.setattr(verifiers, "_ANSWER_SECONDS", 60.0)
                    episode = asyncio.ensure_future(factory.create().run(first, model))
                    await model.called.wait()
                    end(process)
                    with pytest.raises(EnvironmentLost, match=f"{url} closed the connection"):
                        await episode
        finally:
            await factory.close()

    asyncio.run(asyncio.wait_for(main(), 300))


def test_a_cancelled_episode_ends_on_the_server(server):
    (first, *_) = load_tasks(dataset(), DataConfig(train=dataset()))

    async def main() -> None:
        factory = environment(url=server).make_factory()
        try:
            async with SilentModel() as model:
                episode = asyncio.ensure_future(factory.create().run(first, model))
                await model.called.wait()
                episode.cancel()
                await model.left.wait()
        finally:
            await factory.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_task_that_the_server_refuses_says_why(server):
    columns = {"verifiers_taskset": {}, "verifiers_data": {"prompt": "1+1?"}}  # without an answer
    wrong = Task(0, (), columns=columns)

    async def main() -> None:
        factory = environment(url=server).make_factory()
        try:
            with pytest.raises(verifiers.VerifiersFailed, match=r"refuses the episode: .*\n.*answer"):
                await factory.create().run(
                    wrong, SimpleNamespace(name="policy", api_key="key", base_url="http://127.0.0.1:9/v1")
                )
        finally:
            await factory.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_the_address_of_a_server_is_checked(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    url = f"tcp://127.0.0.1:{free_port()}"
    [problem] = server_problems(SimpleNamespace(generation=None, rewards=(), env=environment(url=url)))
    assert (problem.field, problem.value) == ("env.url", url)
    [problem] = environment(url="http://127.0.0.1").problems({})
    assert (problem.field, problem.fix) == ("url", "expected an address such as tcp://127.0.0.1:5000")
    [problem] = environment(url=url, environment={"id": "x"}).problems({})
    assert (problem.field, problem.fix) == ("environment", "the server has its own settings; remove it")
