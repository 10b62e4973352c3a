"""A thousand conversations at once; some environments are slow, hang, raise or lose their process."""

import asyncio
import gc

from paced_rollouts import Delays, PacedEngine, PacedEnvironment, PacedFactory
from rollouts import DEADLINE_SECONDS, experiment, late_seconds

from nemorl.commands.env import HeldResources
from nemorl.generation.router import Replica, Router
from nemorl.rewards import scored
from nemorl.rollout.collector import Collector
from nemorl.rollout.order import TaskOrder
from nemorl.rollout.schedule import CollectorPlan, GroupSchedule
from nemorl.rollout.turn_loop import Record
from nemorl.rollout.worker import RolloutWorker
from tests.data.conftest import model_folder

__all__ = ["model_folder"]

NUM_GROUPS, SAMPLES = 250, 4
DELAYS = Delays(model_seconds=0.01, environment_seconds=0.02, turns=2.0, sigma=1.0)
FAULTS = {"hang": 0.002, "raise": 0.02, "die": 0.02}


def alive(*kinds):
    gc.collect()
    return sum(type(one) in kinds for one in gc.get_objects())


async def collect(config, num_groups=NUM_GROUPS):
    """One step of the groups, by the real collector; the engine, what was asked, trained on and dropped."""
    # The first turns wait for each other: they end only if no conversation waits for another to end.
    engine = PacedEngine(DELAYS, num_held=num_groups * SAMPLES)
    worker = RolloutWorker(config, Router([Replica("paced", engine.generate)]), store=len)
    asked, run_groups = [], worker.run_groups

    def counted(assignments):
        asked.extend(assignments)
        return run_groups(assignments)

    worker.run_groups = counted
    schedule = GroupSchedule(TaskOrder(10_000, 0, False), CollectorPlan(num_groups, SAMPLES, 0))
    collector = Collector([worker], schedule, 120)
    collector.advance(0)
    try:
        return engine, asked, await collector.next_batch(), *collector.take_dropped()
    finally:
        await collector.close()
        await worker.close()


def test_all_are_accounted_for_and_nothing_is_left(model_folder, monkeypatch):
    monkeypatch.setattr(scored, "FIRST_WAIT_SECONDS", 0.01)
    config = experiment(model_folder, DELAYS, FAULTS, on_error="drop_group", max_retries=0)

    async def run():
        await collect(config, 10)  # what is imported and started once
        before = HeldResources.now()
        outcome = await collect(config)
        factory = PacedFactory.made[-1]
        await asyncio.sleep(0)  # for tasks that were cancelled last
        return before, HeldResources.now(), factory, outcome

    before, after, factory, (engine, asked, trained, dropped, given_up) = asyncio.run(run())

    assert len(trained) == NUM_GROUPS
    assert len(asked) == len(trained) + len(dropped)
    assert {one.reason for one in dropped} == {"failed"}
    assert given_up == len({one.group for one in asked}) - NUM_GROUPS
    samples = [sample for group in trained for sample in group.trajectories]
    assert len(samples) == NUM_GROUPS * SAMPLES
    assert all(sample.trains and sample.error is None for sample in samples)
    # Each conversation made one environment, and another one for each fault that it met before its last try.
    assert factory.num_closed == factory.num_created
    num_retried = factory.num_created - SAMPLES * len(asked)
    assert num_retried >= sum(sample.num_retries for sample in samples)
    assert factory.faults_met.total() - num_retried >= len(dropped)  # the faults that ended a conversation
    assert set(factory.faults_met) == set(FAULTS)

    # A conversation that waited for those that hang would be as late as the deadline of their call.
    late = late_seconds(factory, engine.released)
    assert late["p50"] < DEADLINE_SECONDS, late

    assert (after.tasks, after.processes) == (before.tasks, before.processes)
    assert after.files <= before.files
    assert after.threads <= before.threads
    # Less than 0.1 MB for each conversation: what the allocator keeps of them, but not what they held.
    assert after.megabytes - before.megabytes < 0.1 * NUM_GROUPS * SAMPLES
    assert alive(PacedEnvironment, Record) == 0
