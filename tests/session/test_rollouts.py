"""Rollout workers that die, hang and come back, in real processes over a real engine."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable

import pytest
import ray

from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.placement import WorkerRequest
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.data import ArithmeticDataset, DataConfig
from nemorl.config.environment import MathEnvConfig
from nemorl.config.run import ClusterConfig, DeadlineConfig
from nemorl.rollout.collector import Collector
from nemorl.rollout.groups import GroupSummary
from nemorl.rollout.order import TaskOrder
from nemorl.rollout.schedule import CollectorPlan, GroupSchedule
from nemorl.session.handles import EngineHandle
from nemorl.session.supervisor import NoRolloutWorkerLeft, RolloutSupervisor, State
from tests.data.conftest import model_folder, tokenizer
from tests.rollout.test_worker import experiment
from tests.session.test_supervisor import process_of

__all__ = ["model_folder", "tokenizer"]

CLUSTER = ClusterConfig(deadlines=DeadlineConfig(health=2.0, start=60.0), object_store_megabytes=100)
STEPS, GROUPS, SAMPLES = 5, 6, 2  # the engine says that its weights are of version 4


async def until(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0.01)


async def sample_through_faults(rollouts: RolloutSupervisor) -> tuple[list[list[GroupSummary]], int]:
    """The groups of all steps, during which a worker is killed, and then both, one of them by a hang."""
    schedule = GroupSchedule(TaskOrder(100, 0, False), CollectorPlan(GROUPS, SAMPLES, 1, num_steps=STEPS))
    collector = Collector(rollouts.handles, schedule, 60.0)
    steps: list[list[GroupSummary]] = []
    num_dropped = 0
    try:
        for number in range(STEPS):
            collector.advance(number)
            if number == 1:
                os.kill(process_of(rollouts.members[0].worker), signal.SIGKILL)
            if number == 3:
                await until(lambda: rollouts.metrics()["rollout/workers_restarted"] == 1)
                await until(lambda: len(rollouts.in_state(State.UP)) == 2)
                os.kill(process_of(rollouts.members[0].worker), signal.SIGSTOP)
                os.kill(process_of(rollouts.members[1].worker), signal.SIGKILL)
            steps.append(await collector.next_batch())
            num_dropped += len(collector.take_dropped()[0])
    finally:
        await collector.close()
    return steps, num_dropped


def test_rollout_workers_die_hang_and_come_back(model_folder, tmp_path):
    train = ArithmeticDataset(name="arithmetic", digits=1, size=100)
    config = experiment(
        model_folder, env=MathEnvConfig(name="math"), rewards=(), data=DataConfig(train=train, chat=False)
    )

    async def main(runtime: ClusterRuntime) -> None:
        start = {
            "placement": await runtime.reserve(), "threads": 1, "run_dir": tmp_path, "deadline_seconds": 60,
            "concurrent": True,
        }  # fmt: skip
        engine = {"model_path": model_folder, "seconds": 0.02}
        engines = await WorkerGroup.start(
            "generation", "tests.rollout.ray_engine:AddingEngine", [engine], **start
        )
        replicas = [EngineHandle(worker).as_replica() for worker in engines.workers]
        kwargs = {"experiment": config, "engines": []}  # which it gets when it returns
        group = await WorkerGroup.start(
            "rollout", "nemorl.rollout.worker:RayRolloutWorker", [kwargs] * 2, **start
        )
        rollouts = RolloutSupervisor(group, CLUSTER, lambda: replicas)
        for replica in replicas:
            await rollouts.add(replica, 60.0)
        rollouts.start_watch()
        steps, num_dropped = await sample_through_faults(rollouts)
        # Every group is in one step, scored, and its trajectories have outlived the workers.
        assert sorted(g.group for step in steps for g in step) == list(range(STEPS * GROUPS))
        for group_ in (g for step in steps for g in step):
            assert [t.reward for t in group_.trajectories] == [1.0] * SAMPLES
            stored = ray.get(group_.reference)
            assert [stored[t.row].group for t in group_.trajectories] == [group_.group] * SAMPLES
        assert num_dropped > 0
        await until(lambda: rollouts.metrics()["rollout/workers_restarted"] == 3)
        assert rollouts.metrics()["rollout/workers_lost"] == 3
        assert "the process vanished" in dict(rollouts.losses[:1])["rollout worker 0"]
        causes = " ".join(cause for _, cause in rollouts.losses[1:])
        assert re.search(r"does not respond; its process \d+ is stopped", causes)
        await give_up_on_both(rollouts)
        await rollouts.close()
        await group.shutdown()
        await engines.shutdown()

    requests = [WorkerRequest("generation", 1), WorkerRequest("rollout", 2)]
    with ClusterRuntime(CLUSTER, requests) as runtime:
        asyncio.run(asyncio.wait_for(main(runtime), 200))


async def give_up_on_both(rollouts: RolloutSupervisor) -> None:
    """Without attempts left the wait ends with what happened to each."""
    for member in rollouts.members:
        member.attempts = CLUSTER.max_worker_restarts
        member.handle.take_progress()
    schedule = GroupSchedule(TaskOrder(100, 0, False), CollectorPlan(GROUPS, SAMPLES, 0, num_steps=1))
    collector = Collector(rollouts.handles, schedule, 60.0)
    for member in rollouts.members:
        os.kill(process_of(member.worker), signal.SIGKILL)
    began = time.monotonic()
    collector.advance(0)
    with pytest.raises(NoRolloutWorkerLeft, match=r"all 2 rollout workers are lost(.|\n)*rollout worker 1: "):
        await collector.next_batch()
    assert time.monotonic() - began < 60.0  # not at the collector's deadline
    await collector.close()
