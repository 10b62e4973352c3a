"""Scores of steps as rewards of answers, turns and tokens."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from nemorl.config.environment import ModelRewardConfig
from nemorl.data.packed import pack_trajectories, with_turns
from nemorl.rewards.compose import Rewards
from nemorl.rewards.steps import StepReward, StepRewards, StepScore, step_rewards, token_at, with_step_rewards
from nemorl.trajectories import Conversation, Message, StopReason, Trajectory, Turn
from tests.rewards.stand_in import KEY, listening
from tests.rewards.test_compose import TASK

PROBABILITIES = (0.75, 0.5, 0.8)
SCORES = [StepScore(0, n, math.log(p / (1 - p))) for n, p in enumerate(PROBABILITIES)]
# After one, two and three steps, by hand.
AFTER = {
    "min": (0.75, 0.5, 0.5),
    "prod": (0.75, 0.375, 0.3),
    "mean": (0.75, 0.625, 2.05 / 3),
    "last": (0.75, 0.5, 0.8),
    "sum": (0.75, 1.25, 2.05),
}


def decode(tokens):
    """Token 20 is the two characters of 0 and 1."""
    return "".join("ab" if token == 20 else "abcdefghij"[token] for token in tokens)


@pytest.mark.parametrize("reduce", AFTER)
def test_what_steps_earn_adds_up_to_the_reward_of_the_answer(reduce):
    rewards = step_rewards(SCORES, reduce)
    first, second, third = AFTER[reduce]
    assert [step.earned for step in rewards.steps] == pytest.approx([first, second - first, third - second])
    assert rewards.total == pytest.approx(third)


def test_sure_scores_do_not_overflow():
    rewards = step_rewards([StepScore(0, 1, 1000.0), StepScore(0, 2, -1000.0)], "last")
    assert [step.earned for step in rewards.steps] == [1.0, -1.0]


def test_a_step_ends_at_the_first_token_that_completes_its_text():
    tokens = [2, 20, 3]  # c, ab, d
    assert [token_at(tokens, end, decode) for end in range(1, 7)] == [0, 1, 1, 2, 2, 2]


def two_turns() -> Conversation:
    """A prompt, "cab", "d" that ends it, an observation, and "ef"."""
    mask = np.array([0, 1, 1, 1, 0, 1, 1], dtype=np.bool_)
    trajectory = Trajectory(
        tokens=np.array([9, 2, 20, 3, 8, 4, 5], dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(7, dtype=np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=(Turn(1, 4, StopReason.STOP), Turn(5, 7, StopReason.STOP)),
        rewards={},
        reward=0.0,
        stop=StopReason.STOP,
        group=0,
        task=0,
    )
    exchange = (Message("assistant", "cab"), Message("user", "i"), Message("assistant", "ef"))
    return Conversation(trajectory, TASK.messages, exchange, 1)


REWARDS = StepRewards((StepReward(0, 1, 0.5), StepReward(0, 3, -0.25), StepReward(1, None, 1.0)))


def test_turns_and_tokens_have_the_rewards_of_their_steps():
    placed = with_step_rewards(two_turns(), "process", 2.0, REWARDS, decode).trajectory
    assert [turn.rewards for turn in placed.turns] == [{"process": 0.25}, {"process": 1.0}]
    assert [turn.steps for turn in placed.turns] == [((1, 1.0), (2, -0.5)), ()]
    # In a batch: at the tokens of steps, and the rest of a turn at its end.
    batch = pack_trajectories([placed, placed], [0.0, 0.0], [1.0, 1.0])
    batch = with_turns(batch, [placed, placed], [(0.5, 2.0), (1.5, 3.0)])
    assert batch.rewards.tolist() == [0, 1.0, -0.5, 0, 0, 0, 2.0, 0, 1.0, -0.5, 1.0, 0, 0, 3.0]


def test_messages_that_are_not_the_turns_keep_the_reward_of_the_whole():
    one = two_turns()
    agent = replace(one, exchange=one.exchange[2:])
    assert with_step_rewards(agent, "process", 1.0, REWARDS, decode) is agent


def test_a_served_process_reward_model_rewards_answers_and_turns(monkeypatch):
    monkeypatch.setenv("REWARD_KEY", KEY)
    turns_and_ends = ((0, 1), (0, 3), (1, None))
    steps = [
        {"turn": turn, "end": end, "reward": score.logit}
        for (turn, end), score in zip(turns_and_ends, SCORES, strict=True)
    ]
    answers = iter(([{"index": 0, "steps": steps}], [{"index": 0, "reward": 1.0}]))

    async def main():
        async with listening(lambda body: {"data": next(answers)}) as server:
            config = ModelRewardConfig(
                kind="model", url=server.url, model="taste", api_key_env="REWARD_KEY", weight=2.0,
                steps={"separator": "\n"},
            )  # fmt: skip
            rewards = Rewards([config], {}, True, seconds=20.0, decode=decode)
            try:
                return [await rewards.apply(TASK, [two_turns()]) for _ in range(2)], server.asked
            finally:
                await rewards.close()

    (scored, broken), asked = asyncio.run(main())
    assert asked[0]["steps"] == {"separator": "\n"}
    (trajectory,) = scored.trajectories
    assert trajectory.rewards == pytest.approx({"model": 0.5})  # the least
    assert trajectory.reward == pytest.approx(1.0)
    assert [turn.reward for turn in trajectory.turns] == pytest.approx([1.0, 0.0])
    assert [token for token, _ in trajectory.turns[0].steps] == [1, 2]
    assert [earned for _, earned in trajectory.turns[0].steps] == pytest.approx([1.5, -0.5])
    assert "expected a list `steps`" in broken.trajectories[0].error
