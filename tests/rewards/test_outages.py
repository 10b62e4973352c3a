"""Calls of a service that does not answer, answers again, or refuses one call alone."""

import asyncio

import pytest

from nemorl.config.environment import ModelRewardConfig
from nemorl.rewards import scored
from nemorl.rewards.compose import Rewards
from nemorl.rewards.scored import Attempts, Service
from tests.rewards.stand_in import KEY, listening
from tests.rewards.test_compose import TASK, conversation
from tests.rewards.test_model_service import by_length

SAID = [conversation(text) for text in ("a", "bbb", "cc")]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KEY", KEY)
    monkeypatch.setattr(scored, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(scored, "MAX_WAIT_SECONDS", 0.05)


def scores(answer, outage_seconds, held=False, **options):
    """What three answers are rewarded by a server, and what waits for one that is `held` for a while."""

    async def main():
        async with listening(answer) as server:
            server.held = asyncio.Event() if held else None
            config = {"url": server.url, "model": "taste", "api_key_env": "REWARD_KEY", "max_retries": 0}
            reward = ModelRewardConfig(kind="model", **{**config, **options})
            rewards = Rewards([reward], {}, True, 60.0, outage_seconds)
            try:
                scoring = asyncio.create_task(rewards.apply(TASK, SAID))
                waiting = "", 0, 0.0
                if server.held is not None:
                    while len(server.asked) < 6:  # each of them for the second time
                        await asyncio.sleep(0.01)
                    waiting = rewards.services[0].name, *rewards.services[0].waits()
                    server.held.set()
                return await scoring, waiting, server
            finally:
                await rewards.close()

    return asyncio.run(main())


def test_calls_wait_for_a_server_that_is_down():
    statuses = iter([503] * 20)
    group, _, server = scores(lambda body: next(statuses, by_length(body)), 600.0)
    assert [t.reward for t in group.trajectories] == [1.0, 3.0, 2.0]
    assert group.scoring["model"].retries == 20
    assert group.scoring["model"].errors == 0
    assert len(server.asked) == 21


def test_calls_wait_for_a_server_that_hangs_and_are_counted():
    group, (name, number, seconds), server = scores(by_length, 600.0, held=True, deadline=0.1, batch_size=1)
    assert [t.reward for t in group.trajectories] == [1.0, 3.0, 2.0]
    assert name == f"reward `model` at {server.url}"
    assert number == 3
    assert seconds >= 0.1  # the deadline of the first ones
    assert group.scoring["model"].retries >= 3


def test_the_wait_is_bounded_for_all_calls_of_an_outage(caplog):
    group, _, server = scores(lambda body: 503, 0.5, batch_size=1, max_concurrent=1)
    assert all("has not answered" in t.error for t in group.trajectories)
    # The second and the third were sent once: the outage was over its bound.
    last = [body["conversations"][0]["completion"][0]["content"] for body in server.asked[-2:]]
    assert last == ["bbb", "cc"]
    assert caplog.text.count("does not answer; calls wait for it") == 1


@pytest.mark.parametrize(
    ("on_error", "rewards", "dropped"),
    [("skip", [], False), ("zero", [0.0] * 3, False), ("drop_group", [], True)],
)
def test_what_becomes_of_answers_without_a_reward(on_error, rewards, dropped):
    group, _, _ = scores(lambda body: 503, 0.0, on_error=on_error)
    assert [t.rewards["model"] for t in group.trajectories if t.error is None] == rewards
    assert group.is_dropped == dropped
    assert group.scoring["model"].errors == 3


def test_a_call_that_fails_alone_is_not_repeated_for_long():
    """The service answers others meanwhile."""

    async def main() -> list[bool]:
        service, again = Service("it", 600.0), []
        attempts = Attempts(service)
        again.append(await attempts.repeat("no answer"))
        service.answered()  # to another call
        again.append(await attempts.repeat("no answer"))
        return again

    assert asyncio.run(main()) == [True, False]
