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
    """Environments that answer once; each of the first calls of all of them meets one of the `faults`.

    With `creating` these are the calls of `create`; None is no environment.
    """

    def __init__(self, faults=(), creating=False):
        self.reward_weights = {"done": 1.0}
        self._faults, self._creating = iter(faults), creating

    def create(self):
        if not self._creating:
            return Fails(self._faults)
        fault = next(self._faults, Fails)
        if fault is None:
            return None
        if fault is not Fails:
            raise fault("gone")
        return Fails(iter(()))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(scored, "FIRST_WAIT_SECONDS", 0.01)


def sampled(model_folder, tokenizer, faults, outage=600.0, validation=False, creating=False, **env):
    """A group of two, and the requests of its turns."""
    deadlines = DeadlineConfig(environment=0.2, outage=outage)
    options = {"factory": f"{__name__}:FailingFactory", "options": {"faults": faults, "creating": creating}}
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


@pytest.mark.parametrize("fault", [ValueError, SystemExit, EnvironmentLost, None])
def test_an_environment_that_cannot_be_created_costs_its_conversation_alone(model_folder, tokenizer, fault):
    group, requests = sampled(model_folder, tokenizer, [fault], creating=True)
    assert [t.reward for t in group.trajectories] == [3.0, 1.0]
    assert sorted(t.num_retries for t in group.trajectories) == [0, 1]
    assert len(requests) == 2  # nothing was sampled without an environment
    if fault is EnvironmentLost:  # which is tried again until the outage ends
        return
    given = {"faults": [fault] * 3, "creating": True}  # one of the two cannot be created in the end
    skipped, _ = sampled(model_folder, tokenizer, **given)
    assert sorted(t.environment_failed for t in skipped.trajectories) == [False, True]
    assert [t.trains for t in skipped.trajectories] == [
        not t.environment_failed for t in skipped.trajectories
    ]
    dropped, _ = sampled(model_folder, tokenizer, on_error="drop_group", **given)
    assert isinstance(dropped, Dropped)
    with pytest.raises(ConversationFailed, match=r"environment create: \w+: .*"):
        sampled(model_folder, tokenizer, on_error="fail", **given)


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
