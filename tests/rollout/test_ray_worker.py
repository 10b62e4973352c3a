"""Rollout workers and engines in real processes, with a real environment that has a process of its own."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import ray

from nemorl.cluster.errors import WorkerFailed
from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.placement import WorkerRequest
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.data import ArithmeticDataset, DataConfig
from nemorl.config.environment import MathEnvConfig
from nemorl.config.run import ClusterConfig
from nemorl.data.datasets import load_tasks
from nemorl.rollout.collector import Collector
from nemorl.rollout.order import TaskOrder
from nemorl.rollout.schedule import CollectorPlan, DataPlace, GroupSchedule
from nemorl.session.handles import EngineHandle, RolloutHandle
from tests.rollout.test_worker import experiment


@pytest.fixture(scope="module")
def placement():
    requests = [WorkerRequest("generation", 2), WorkerRequest("rollout", 1)]
    with ClusterRuntime(ClusterConfig(object_store_megabytes=100), requests) as runtime:
        yield asyncio.run(runtime.reserve())


def start(placement, name, target, kwargs, run_dir) -> WorkerGroup:
    return asyncio.run(
        WorkerGroup.start(
            name,
            target,
            kwargs,
            placement=placement,
            threads=1,
            run_dir=run_dir,
            deadline_seconds=60,
            concurrent=True,
        )
    )


def collect(
    rollout: WorkerGroup, num_groups: int, meanwhile: Coroutine[Any, Any, None] | None = None, first: int = 0
):
    """One synchronous step of `num_groups` groups of two."""

    async def main():
        workers = [RolloutHandle(worker, 60.0) for worker in rollout.workers]
        plan = CollectorPlan(num_groups, 2, 0)
        schedule = GroupSchedule(TaskOrder(50, 0, False), plan, place=DataPlace(first))
        collector = Collector(workers, schedule, 60)
        collector.advance(0)
        try:
            batch = collector.next_batch()
            return (await asyncio.gather(batch, *([meanwhile] if meanwhile is not None else [])))[0]
        finally:
            await collector.close()

    return asyncio.run(main())


def test_groups_cross_processes_and_dead_engines_are_named(placement, model_folder, tmp_path):
    train = ArithmeticDataset(name="arithmetic", digits=1, size=50)
    config = experiment(
        model_folder, env=MathEnvConfig(name="math"), rewards=(), data=DataConfig(train=train, chat=False)
    )
    sums = [int(task.answer) for task in load_tasks(config.data.train, config.data)[:12]]
    deadly = max(sums, key=sums.index)  # the one that comes up last
    first_deadly = sums.index(deadly)
    assert first_deadly > 4
    engine = "tests.rollout.ray_engine:AddingEngine"
    engines = start(
        placement, "generation", engine, [{"model_path": model_folder, "deadly": deadly}] * 2, tmp_path
    )
    replicas = [EngineHandle(worker).as_replica() for worker in engines.workers]
    rollout = start(
        placement,
        "rollout",
        "nemorl.rollout.worker:RayRolloutWorker",
        [
            {
                "experiment": config,
                "engines": replicas,
            }
        ],
        tmp_path,
    )
    batch = collect(rollout, first_deadly)
    assert [s.group for s in batch] == list(range(first_deadly))
    assert all(t.reward == 1.0 for s in batch for t in s.trajectories)
    assert {t.max_version for s in batch for t in s.trajectories} == {4}
    for summary in batch:
        stored = ray.get(summary.reference)  # with other groups that ended at the same time
        assert [stored[t.row].group for t in summary.trajectories] == [summary.group] * 2
        assert [stored[t.row].num_tokens for t in summary.trajectories] == [
            t.num_tokens for t in summary.trajectories
        ]

    # Two samples kill both engines, and fail when it is clear that none returns; a router has the causes.
    causes = {}

    async def give_up() -> None:
        (worker,) = rollout.workers
        while len(causes) < 2:
            causes.update(await worker.call("router.lost_replicas", stage="test", seconds=60))
        await worker.call("router.give_up", causes, stage="test", seconds=60)

    with pytest.raises(WorkerFailed, match="NoReplicaLeft: all 2 generation replicas are lost") as failed:
        collect(rollout, 1, give_up(), first=first_deadly)  # whose samples are on different engines
    for rank in range(2):
        died = f"generation rank {rank} died in stage 'generation': the process vanished"
        assert f"generation replica {rank}: {died}" in str(failed.value)
    asyncio.run(rollout.shutdown())
    asyncio.run(engines.shutdown())
