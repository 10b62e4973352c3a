import asyncio
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from nemorl.algorithms.metrics import rollout_metrics
from nemorl.config.environment import FunctionRewardConfig
from nemorl.rewards import scored
from nemorl.rewards.compose import Rewards, smoke_test_reward
from nemorl.rewards.find import RewardError
from nemorl.rewards.scored import Answers, attempt
from nemorl.rollout.groups import GroupSummary, SampleText, summarize
from nemorl.run.recorder import samples_of
from nemorl.trajectories import Conversation, Message, StopReason, Task, Trajectory, Turn

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


def own(function: str, **options) -> FunctionRewardConfig:
    return FunctionRewardConfig(function=f"{OWN}:{function}", **options)


def pay(configs, conversations, *, weights=None, chat=False, seconds=5.0, task=TASK):
    """Trajectories, and how the scoring went."""
    rewards = Rewards(configs, weights or {}, chat, seconds)
    return asyncio.run(rewards.apply(task, conversations))


def apply(configs, conversations, **options):
    return pay(configs, conversations, **options).trajectories


def test_rewards_are_weighted_and_summed_with_the_environments():
    configs = [
        FunctionRewardConfig(function="exact_match", weight=2.0),
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
    (paid,) = apply(
        [FunctionRewardConfig(function="exact_match")], [given], weights={"env": 10.0, "end": 0.1}
    )
    assert [turn.reward for turn in paid.turns] == pytest.approx([5.0, 10.2])
    assert paid.reward == pytest.approx(5.0 + 10.2 + 1.0)  # the function scores the whole


def test_a_reward_that_does_not_apply_is_absent():
    easy = Task(0, TASK.messages, None, {"level": "easy"})
    configs = [own("only_hard"), FunctionRewardConfig(function="exact_match")]
    (trajectory,) = apply(configs, [conversation("4")], task=easy)
    assert trajectory.rewards == {}
    assert trajectory.reward == 0.0


def test_failed_trajectories_are_neither_shown_nor_rewarded():
    failed = conversation("4", error="environment step 1: lost")
    first, second = apply([own("word_count")], [failed, conversation("one two")])
    assert first is failed.trajectory
    assert second.rewards == {"word_count": 2.0}
    assert apply([own("too_few")], [failed, failed]) == [failed.trajectory] * 2


def test_chat_functions_get_messages():
    (trajectory,) = apply([FunctionRewardConfig(function="exact_match")], [conversation("4")], chat=True)
    assert trajectory.reward == 1.0
    columns = Answers(TASK, [conversation("4")], chat=True).columns
    assert columns["prompts"] == [[{"role": "user", "content": "2+2?"}]]
    assert columns["completions"] == [[{"role": "assistant", "content": "4"}]]
    assert columns["completion_ids"] == [[1, 2]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", r"reward `too_few` returned 1 value for 2 completions; return one"),
        ("a_number", r"reward `a_number` returned 1\.0 for 2 completions"),
        ("not_finite", "reward `not_finite` returned nan; return a finite number"),
        ("raises", "reward `raises`: LookupError: no such word"),
        ("sleeps", r"reward `sleeps`: no answer within 0\.05 s"),
        ("leaves", r"reward `leaves`: RuntimeError: it raised SystemExit\(3\)"),
    ],
)
def test_a_reward_that_cannot_be_computed_costs_the_trajectory_or_the_run(name, message):
    given = [conversation("4"), conversation("5")]
    deadline = 0.05 if name == "sleeps" else None
    with pytest.raises(RewardError, match=message):
        apply([own(name, on_error="fail", deadline=deadline)], given, seconds=60.0)

    paid = pay([own(name, deadline=deadline), own("half")], given, seconds=60.0)

    for trajectory in paid.trajectories:
        assert re.search(message, trajectory.error)
        assert (trajectory.stop, trajectory.reward, trajectory.rewards) == (StopReason.ERROR, 0.0, {})
        assert not trajectory.loss_mask.any()
    assert paid.scoring[name].errors == 2
    assert paid.scoring["half"].errors == 0


def test_an_answer_that_cannot_be_scored_costs_no_other():
    paid = pay([own("fails_for_five")], [conversation("4"), conversation("5"), conversation("6")])

    assert [t.reward for t in paid.trajectories] == [1.0, 0.0, 1.0]
    assert [t.error is None for t in paid.trajectories] == [True, False, True]
    assert "returned inf; return a finite number" in paid.trajectories[1].error
    assert paid.scoring["fails_for_five"].errors == 1
    # One token of the prompt and two sampled in each, in the lost one too.
    members = tuple(summarize([t], row) for row, t in enumerate(paid.trajectories))
    group = GroupSummary(0, 0, None, members, texts=(SampleText(1, "2 + 3 =", "5"),))
    metrics = rollout_metrics([group], 0)
    assert (metrics["length/mean"], metrics["tokens/generated"], metrics["errors"]) == (2, 6, 1)
    (sample,) = samples_of(1, [group], "training")
    assert (sample.prompt_tokens, sample.sampled_tokens) == (1, 2)


def test_a_column_that_no_task_has_ends_the_run():
    with pytest.raises(
        RewardError, match="reward `wants` asks for solution; the columns are answer, completion"
    ):
        apply([own("wants")], [conversation("4")])


def test_verls_functions_see_one_answer_at_a_time():
    said = [conversation("4"), conversation("5"), conversation("raise")]
    task = Task(0, TASK.messages, "4", {"data_source": "sums", "reward_model": {"ground_truth": "5"}})

    paid = pay([own("compute_score", arguments={"factor": 0.5})], said, task=task)

    assert [t.reward for t in paid.trajectories] == [0.0, 0.5, 0.0]  # the ground truth is verl's column
    assert paid.trajectories[2].error == "reward `compute_score`: ValueError: no such solution"
    assert paid.scoring["compute_score"].errors == 1
    assert [t.reward for t in apply([own("compute_score_async")], said[:2])] == [1.0, 0.0]
    parts = [
        own("compute_score", arguments={"factor": 0.5}),
        own("compute_score", name="acc", score_key="acc"),
    ]
    paid = pay(parts, said[:2], task=task)
    assert [t.rewards for t in paid.trajectories] == [
        {"compute_score": 0.0, "acc": 0.0},
        {"compute_score": 0.5, "acc": 1.0},
    ]


@pytest.mark.parametrize("name", ["reward_func", "reward_func_with_logs"])
def test_openrlhfs_functions_see_texts_and_labels(name):
    assert [t.reward for t in apply([own(name)], [conversation("4"), conversation("5")])] == [1.0, 0.0]


def test_a_signature_may_be_named():
    with pytest.raises(RewardError, match="reward `compute_score_async` asks for ground_truth, solution_str"):
        apply([own("compute_score_async", signature="trl")], [conversation("4")])
    with pytest.raises(
        RewardError, match=r"`openrlhf` functions receive keyword arguments: `\(queries, prompts"
    ):
        Rewards([own("half", signature="openrlhf")], {}, chat=False, seconds=1.0)


def test_a_name_is_what_metrics_say():
    configs = [own("half", name="first"), own("half", name="second", weight=2.0)]
    (trajectory,) = apply(configs, [conversation("4")])
    assert trajectory.rewards == {"first": 0.5, "second": 0.5}
    assert trajectory.reward == 1.5


def test_who_waits_for_a_place_is_not_late(monkeypatch):
    """Seven calls, one at a time: the deadline of each begins when it has the place."""
    running, now = [], [0.0]

    async def one_at_a_time(call, stage, seconds):
        running.append(seconds)
        assert len(running) == 1
        outcome = await attempt(call, stage, seconds)
        now[0] += 1.0
        running.clear()
        return outcome

    monkeypatch.setattr(scored, "attempt", one_at_a_time)
    monkeypatch.setattr(scored, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rewards = Rewards([own("half", max_concurrent=1, deadline=60.0)], {}, chat=False, seconds=0.01)

    async def main():
        return await asyncio.gather(*(rewards.apply(TASK, [conversation("4")]) for _ in range(7)))

    scoring = [paid.scoring["half"] for paid in asyncio.run(main())]
    assert [s.errors for s in scoring] == [0] * 7
    assert [s.seconds for s in scoring] == [1.0] * 7
    assert [s.waited for s in scoring] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_functions_that_never_return_keep_no_place():
    """Many more of them than a pool of threads would have; what comes after them is scored."""
    never = threading.Event()
    hangs = own("waits", arguments={"event": never}, max_concurrent=10, deadline=0.01)

    async def main():
        rewards = Rewards([hangs], {}, chat=False, seconds=60.0)
        lost = await asyncio.gather(*(rewards.apply(TASK, [conversation("4")]) for _ in range(70)))
        returns = Rewards([own("fails_for_five")], {}, chat=False, seconds=60.0)
        return lost, await returns.apply(TASK, [conversation("4")])

    lost, after = asyncio.run(main())
    never.set()
    assert all("no answer within 0.01 s" in paid.trajectories[0].error for paid in lost)
    assert after.trajectories[0].reward == 1.0


def test_a_slow_function_holds_nothing_else_up():
    """Four calls that end only when all four have begun."""

    async def main():
        barrier = threading.Barrier(4, timeout=60)
        rewards = Rewards([own("meets", arguments={"barrier": barrier})], {}, chat=False, seconds=120.0)
        return await asyncio.gather(*(rewards.apply(TASK, [conversation("4")]) for _ in range(4)))

    assert [paid.trajectories[0].reward for paid in asyncio.run(main())] == [1.0] * 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            FunctionRewardConfig(function="exakt"),
            "unknown reward `exakt`; built-in rewards: constant, exact_match, format_tags",
        ),
        (FunctionRewardConfig(function="exact_mach"), "`exact_mach`; did you mean `exact_match`. built-in"),
        (own("halve"), rf"{OWN} has no halve; did you mean `half`\?"),
        (FunctionRewardConfig(function="no.such:f"), "reward `no.such:f`: cannot import no.such"),
        (own("missing"), f"{OWN} has no missing; correct the name"),
        (own("NOT_A_FUNCTION"), f"NOT_A_FUNCTION in {OWN} is not callable: it is of type "),
        (own("half", arguments={"size": 1}), "takes no argument size"),
        (own("yields"), "yields: return a list"),
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
    with pytest.raises(RewardError, match="the environment gave the rewards bonus"):
        apply([], [conversation("4", {"bonus": 1.0})], weights={"env": 1.0})


def test_a_function_that_hangs_is_tried_once(monkeypatch):
    calls = []

    async def hangs(completions, **columns):
        calls.append(completions)
        await asyncio.Event().wait()

    monkeypatch.setattr(f"{OWN}.half", hangs)
    reason = smoke_test_reward(own("half"), TASK, False, 0.05)
    assert reason == "no answer within 0.05 s"
    assert len(calls) == 1
