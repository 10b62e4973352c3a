import asyncio

from nemorl.config.environment import SingleTurnEnvConfig
from nemorl.trajectories import SingleTurnFactory, Step
from tests.environments.episodes import answer, task


def test_it_asks_once_and_rewards_nothing():
    factory = SingleTurnFactory(SingleTurnEnvConfig())
    assert asyncio.run(factory.create().reset(task())) == task().messages
    assert asyncio.run(answer(factory, task(), "7")) == Step(done=True)
    assert factory.reward_weights == {}
