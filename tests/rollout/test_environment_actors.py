"""Environments in actors of a run: places, an actor that dies, and a run with them."""

import asyncio
import os
from pathlib import Path

import pytest

from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.placement import worker_requests
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.environment import CustomEnvConfig
from nemorl.config.environment_base import ActorPlacement
from nemorl.config.run import ClusterConfig, DeadlineConfig
from nemorl.generation.router import Replica, Router
from nemorl.rollout.groups import GroupAssignment
from nemorl.rollout.worker import RolloutWorker
from nemorl.session.supervisor import EnvironmentSupervisor, State
from nemorl.trajectories import Environment, EnvironmentFactory, Step
from tests.data.tokenizers import ENDOFTEXT
from tests.rollout.stand_ins import EchoEngine
from tests.rollout.test_worker import experiment
from tests.run.runs import finish, known_figures, lines, start, tiny_model, write_experiment


class Deadly(Environment):
    """Ends its process in the first episode of task 3."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    async def reset(self, task):
        self._task = task.index
        return task.messages

    async def step(self, action):
        await asyncio.sleep(0.3)
        if self._task == 3 and not self._mark.exists():
            self._mark.touch()
            os._exit(7)
        return Step(rewards={"process": float(os.getpid())})


class DeadlyFactory(EnvironmentFactory):
    def __init__(self, mark: str) -> None:
        self.reward_weights = {"process": 1.0}
        self._mark = Path(mark)

    def create(self):
        return Deadly(self._mark)


def test_a_dead_actor_loses_its_own_episodes_and_returns(model_folder, tokenizer, tmp_path):
    placement = ActorPlacement(name="actors", num_actors=2, max_episodes=2)
    options = {"mark": str(tmp_path / "mark")}
    factory = f"{__name__}:DeadlyFactory"
    env = CustomEnvConfig(name="custom", factory=factory, options=options, placement=placement)
    cluster = ClusterConfig(object_store_megabytes=100, deadlines=DeadlineConfig(environment=30, outage=60))
    config = experiment(model_folder, env=env, rewards=(), cluster=cluster, run_dir=tmp_path)
    engine = EchoEngine(lambda request: [*tokenizer.encode("12"), ENDOFTEXT])

    async def main(reserved):
        kwargs = {"config": env, "max_sessions": 2, "idle_seconds": 60.0}
        group = await WorkerGroup.start(
            "environment", "nemorl.serve.environment_sessions:EnvironmentHost", [kwargs] * 2,
            placement=reserved, threads=1, run_dir=tmp_path, deadline_seconds=120, concurrent=True,
        )  # fmt: skip
        worker = RolloutWorker(
            config, Router([Replica("echo", engine.generate)]), store=list, actors={"": group.workers}
        )
        supervisor = EnvironmentSupervisor(group, cluster)

        async def announce(actors):
            await worker.set_actors("", actors)

        supervisor.announce = announce
        supervisor.start_watch()
        try:
            groups = [GroupAssignment(task, task, num_samples=2) for task in range(6)]
            outcomes = [outcome async for outcome in worker.run_groups(groups)]
            async with asyncio.timeout(120):
                while len(supervisor.in_state(State.UP)) < 2:
                    await asyncio.sleep(0.1)
            again = [outcome async for outcome in worker.run_groups(groups)]
            return outcomes, again, supervisor.metrics()
        finally:
            await worker.close()
            await supervisor.close()
            await group.shutdown()

    requests = [one for one in worker_requests(config) if one.group == "environment"]
    assert [one.count for one in requests] == [2]
    with ClusterRuntime(cluster, requests) as runtime:

        async def run():
            return await main(await runtime.reserve())

        outcomes, again, metrics = asyncio.run(run())
    samples = [t for outcome in outcomes for t in outcome.trajectories]
    assert len(samples) == 12
    assert all(t.error is None for t in samples)
    # Two episodes were in the process that died, and at most two more asked it for a place.
    assert 1 <= sum(t.num_retries > 0 for t in samples) <= 4
    assert (tmp_path / "mark").exists()
    after = [t for outcome in again for t in outcome.trajectories]
    assert all(t.error is None and t.num_retries == 0 for t in after)
    assert len({t.reward for t in after}) == 2  # both processes
    assert not {t.reward for t in after} <= {t.reward for t in samples}  # one of them is new
    assert metrics["environment/actors"] == 2
    assert metrics["environment/actors_lost"] == metrics["environment/actors_restarted"] == 1


@pytest.mark.slow
def test_a_run_with_actors(tmp_path):
    model = tiny_model(tmp_path / "model")
    env = {"name": "chained_sums", "num_sums": 2, "placement": {"name": "actors", "num_actors": 2}}
    config = write_experiment(tmp_path, model, "actors", env=env, rewards=[], algorithm={"num_steps": 1})
    status, output = finish(start("train", config))
    assert status == 0, output
    (step,) = lines(tmp_path / "actors")
    assert (step.values["environment/actors"], step.values["environment/actors_lost"]) == (2, 0)
    assert step.values["environment/errors"] == 0
    assert "reward/chained_sums" in step.values
    assert set(step.values) <= known_figures(tmp_path / "actors")
