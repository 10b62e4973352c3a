"""Groups whose environments fail, hang or are lost: what is sampled again, and what becomes of the rest."""

import asyncio

import pytest

from nemorl.config.environment import CustomEnvConfig
from nemorl.config.run import ClusterConfig, DeadlineConfig
from nemorl.generation.router import Replica, Router
from nemorl.rewards import scored
from nemorl.rollout.groups import Dropped, GroupAssignment
from nemorl.rollout.turn_loop import ConversationFailed
from nemorl.rollout.worker import RolloutWorker
from nemorl.trajectories import Environment, EnvironmentFactory, EnvironmentLost, Step
from tests.rollout.stand_ins import EchoEngine
from tests.rollout.test_worker import adds, experiment, sample


class Fails(Environment):
    def __init__(self, faults):
        self._faults = faults

    async def step(self, action):
        fault = next(self._faults, None)
        if fault is TimeoutError:
            await asyncio.Event().wait()
        if fault is not None:
            raise fault("gone")
        return Step(rewards={"done": 1.0})


class FailingFactory(EnvironmentFactory):
    """Environments that answer once; each of the first calls of all of them meets one of the `faults`."""

    def __init__(self, faults=()):
        self.reward_weights = {"done": 1.0}
        self._faults = iter(faults)

    def create(self):
        return Fails(self._faults)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(scored, "FIRST_WAIT_SECONDS", 0.01)


def sampled(model_folder, tokenizer, faults, outage=600.0, validation=False, **env):
    """A group of two, and the requests of its turns."""
    deadlines = DeadlineConfig(environment=0.2, outage=outage)
    options = {"factory": f"{__name__}:FailingFactory", "options": {"faults": faults}}
    env = CustomEnvConfig(name="custom", **options, **env)
    config = experiment(model_folder, env=env, cluster=ClusterConfig(deadlines=deadlines))
    requests = []

    def keep(request):
        requests.append((request.conversation, request.seed))
        return adds(tokenizer)(request)

    worker = RolloutWorker(config, Router([Replica("echo", EchoEngine(keep).generate)]), store=list)
    (outcome,) = sample(worker, [GroupAssignment(30, 4, num_samples=2, validation=validation)])
    return outcome, requests


@pytest.mark.parametrize("fault", [ValueError, TimeoutError, EnvironmentLost])
def test_a_trajectory_is_sampled_again_with_the_same_seeds_and_others_are_not(model_folder, tokenizer, fault):
    group, requests = sampled(model_folder, tokenizer, [fault])
    assert [t.reward for t in group.trajectories] == [3.0, 1.0]
    assert sorted(t.num_retries for t in group.trajectories) == [0, 1]
    assert not any(t.environment_failed for t in group.trajectories)
    assert len(requests) == 3
    assert len(set(requests)) == 2


def test_lost_environments_are_tried_again_until_the_outage_ends(model_folder, tokenizer):
    group, requests = sampled(model_folder, tokenizer, [EnvironmentLost] * 11, max_retries=0)
    assert all(t.error is None for t in group.trajectories)
    assert sum(t.num_retries for t in group.trajectories) == 11
    assert len(requests) == 13
    group, _ = sampled(model_folder, tokenizer, [EnvironmentLost] * 4, outage=0.0)
    assert [t.environment_failed for t in group.trajectories] == [True, True]
    assert [t.num_retries for t in group.trajectories] == [1, 1]


@pytest.mark.parametrize("validation", [False, True])
def test_what_becomes_of_trajectories_without_an_environment(model_folder, tokenizer, validation):
    faults = {"faults": [ValueError] * 3, "validation": validation}  # one of the two answers in the end
    skipped, _ = sampled(model_folder, tokenizer, **faults)
    assert [t.environment_failed for t in skipped.trajectories].count(True) == 1
    assert [t.error is None for t in skipped.trajectories] == [
        not t.environment_failed for t in skipped.trajectories
    ]
    zero, _ = sampled(model_folder, tokenizer, on_error="zero", **faults)
    assert all(t.error is None and t.trains for t in zero.trajectories)
    assert sorted(t.rewards["done"] for t in zero.trajectories) == [0.0, 1.0]
    assert [t.environment_failed for t in zero.trajectories].count(True) == 1
    dropped, _ = sampled(model_folder, tokenizer, on_error="drop_group", **faults)
    assert isinstance(dropped, Dropped) != validation  # whose tasks are counted one by one
    if not validation:
        assert dropped.reason == "failed"
        assert len(dropped.lengths) == 2
    with pytest.raises(ConversationFailed, match=r"environment step 1: ValueError: gone"):
        sampled(model_folder, tokenizer, on_error="fail", **faults)
