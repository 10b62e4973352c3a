import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from nemorl.config.env import RewardConfig
from nemorl.rewards.compose import RewardError, Rewards
from nemorl.rollout.types import Conversation, Message, StopReason, Task, Trajectory, Turn

OWN = "tests.rewards.own_rewards"
TASK = Task(0, (Message("user", "2+2?"),), "4", {"level": "hard"})


def conversation(text: str, rewards=None, error=None) -> Conversation:
    trajectory = Trajectory(
        tokens=np.array([9, 1, 2], dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, dtype=np.float32),
        versions=np.array([-1, 0, 0], dtype=np.int32),
        turns=(),
        rewards=rewards or {},
        reward=0.0,
        stop=StopReason.STOP,
        group=0,
        task=0,
        error=error,
    )
    return Conversation(trajectory, TASK.messages, (Message("assistant", text),), num_prompt_tokens=1)


def own(name: str, **options) -> RewardConfig:
    return RewardConfig(function=f"{OWN}:{name}", **options)


def apply(configs, conversations, *, weights=None, chat=False, seconds=5.0):
    rewards = Rewards(configs, weights or {}, chat, seconds)
    return asyncio.run(rewards.apply(TASK, conversations))


def test_rewards_are_weighted_and_summed_with_the_environments():
    configs = [
        RewardConfig(function="exact_match", weight=2.0),
        own("half", weight=-1.0, arguments={"scale": 0.25}),
        own("word_count", weight=0.1),
    ]
    first, second = apply(
        configs,
        [conversation("4", {"env": 3.0}), conversation("it is 5", {"env": 1.0})],
        weights={"env": 10.0},
    )
    assert first.rewards == {"env": 3.0, "exact_match": 1.0, "half": 0.25, "word_count": 1.0}
    assert first.reward == pytest.approx(30 + 2 - 0.25 + 0.1)
    assert second.rewards == {"env": 1.0, "exact_match": 0.0, "half": 0.25, "word_count": 3.0}
    assert second.reward == pytest.approx(10 + 0 - 0.25 + 0.3)


def test_turns_have_the_weighted_rewards_of_the_environment():
    turns = (Turn(1, 2, StopReason.STOP, {"env": 0.5}), Turn(2, 3, StopReason.STOP, {"env": 1.0, "end": 2.0}))
    given = conversation("4", {"env": 1.5, "end": 2.0})
    given = replace(given, trajectory=replace(given.trajectory, turns=turns))
    (paid,) = apply([RewardConfig(function="exact_match")], [given], weights={"env": 10.0, "end": 0.1})
    assert [turn.reward for turn in paid.turns] == pytest.approx([5.0, 10.2])
    assert paid.reward == pytest.approx(5.0 + 10.2 + 1.0)  # the function pays for the whole


def test_a_reward_that_does_not_apply_is_absent():
    easy = Task(0, TASK.messages, None, {"level": "easy"})
    rewards = Rewards([own("only_hard"), RewardConfig(function="exact_match")], {}, chat=False, seconds=5.0)
    (trajectory,) = asyncio.run(rewards.apply(easy, [conversation("4")]))
    assert trajectory.rewards == {}
    assert trajectory.reward == 0.0


def test_failed_trajectories_are_neither_shown_nor_paid():
    failed = conversation("4", error="environment step 1: lost")
    first, second = apply([own("word_count")], [failed, conversation("one two")])
    assert first is failed.trajectory
    assert second.rewards == {"word_count": 2.0}
    assert apply([own("too_few")], [failed, failed]) == [failed.trajectory] * 2


def test_chat_functions_get_messages():
    rewards = Rewards([RewardConfig(function="exact_match")], {}, chat=True, seconds=5.0)
    (trajectory,) = asyncio.run(rewards.apply(TASK, [conversation("4")]))
    assert trajectory.reward == 1.0
    columns = rewards._columns(TASK, [conversation("4")])
    assert columns["prompts"] == [[{"role": "user", "content": "2+2?"}]]
    assert columns["completions"] == [[{"role": "assistant", "content": "4"}]]
    assert columns["completion_ids"] == [[1, 2]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", r"reward `too_few` answered \[1\.0\] to 2 completions"),
        ("a_number", r"reward `a_number` answered 1\.0 to 2 completions"),
        ("not_finite", "reward `not_finite` answered nan: a finite number"),
        ("raises", "reward `raises`: LookupError: no such word"),
        ("sleeps", r"reward `sleeps`: no answer within 0\.05 s"),
        ("wants", "reward `wants` asks for solution; the columns are answer, completion_ids, completions, l"),
    ],
)
def test_a_reward_that_cannot_be_used_is_named(name, message):
    with pytest.raises(RewardError, match=message):
        apply([own(name)], [conversation("4"), conversation("5")], seconds=0.05)


def test_a_slow_function_holds_nothing_else_up():
    async def main():
        rewards = Rewards([own("sleeps")], {}, chat=False, seconds=5.0)
        start = time.monotonic()
        await asyncio.gather(*(rewards.apply(TASK, [conversation("4")]) for _ in range(4)))
        return time.monotonic() - start

    assert asyncio.run(main()) < 0.9  # four times 0.3 s, one after the other, would be 1.2 s


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardConfig(function="exakt"), "no reward `exakt`: built in are exact_match, format_tags"),
        (RewardConfig(function="no.such:f"), "reward `no.such:f`: cannot import no.such"),
        (own("missing"), f"{OWN} has no function missing"),
        (own("NOT_A_FUNCTION"), f"{OWN} has no function NOT_A_FUNCTION"),
        (own("half", arguments={"size": 1}), "takes no argument size"),
    ],
)
def test_a_reward_that_cannot_be_found_is_named(config, message):
    with pytest.raises(RewardError, match=message):
        Rewards([config], {}, chat=False, seconds=1.0)


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(RewardError, match="two rewards are named `half`"):
        Rewards([own("half"), own("half")], {}, chat=False, seconds=1.0)
    with pytest.raises(RewardError, match="two rewards are named `half`"):
        Rewards([own("half")], {"half": 1.0}, chat=False, seconds=1.0)


def test_an_environments_reward_without_a_weight_is_named():
    with pytest.raises(RewardError, match="the environment pays bonus"):
        apply([], [conversation("4", {"bonus": 1.0})], weights={"env": 1.0})
