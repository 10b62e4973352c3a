"""Judges, against a stand-in of a chat endpoint."""

import asyncio

import pytest

from nemorl.config.environment import JudgeRewardConfig
from nemorl.rewards.compose import Rewards
from nemorl.rewards.services import filled
from tests.rewards.stand_in import KEY, listening
from tests.rewards.test_compose import TASK, conversation

SAID = [conversation(text) for text in ("4", "it is 4", "five")]
ALONE = 'Q: {prompt}\nExpected: {answer}\nA: {completion}\nSay {"score": n}.'
GROUP = "Q: {prompt}\n{completions}"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)


def saying(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def judged(answer, **options):
    async def main():
        async with listening(answer) as server:
            config = {"url": server.url, "model": "judge-1", "api_key_env": "JUDGE_KEY", "prompt": ALONE}
            config = JudgeRewardConfig(kind="judge", **(config | options))
            rewards = Rewards([config], {}, chat=True, seconds=20.0)
            try:
                return await rewards.apply(TASK, SAID), server
            finally:
                await rewards.close()

    return asyncio.run(main())


def test_each_answer_is_judged_alone():
    def answer(body):
        said = body["messages"][-1]["content"].partition("A: ")[2].partition("\n")[0]
        return saying(f'Let me think. {{"score": 1}} no: {{"why": {{"a": 1}}, "score": {len(said)}}}')

    paid, server = judged(answer, system_prompt="You are fair.")

    assert [t.reward for t in paid.trajectories] == pytest.approx([0.1, 0.7, 0.4])
    assert len(server.asked) == 3
    body = next(body for body in server.asked if "A: five" in body["messages"][1]["content"])
    assert body == {
        "model": "judge-1",
        "messages": [
            {"role": "system", "content": "You are fair."},
            {"role": "user", "content": 'Q: 2+2?\nExpected: 4\nA: five\nSay {"score": n}.'},
        ],
        "temperature": 0.0,
        "max_tokens": 512,
    }
    assert server.paths[0] == "/v1/chat/completions"


def test_a_group_is_judged_at_once():
    paid, server = judged(
        lambda body: saying('{"scores": [-1, 3, 1]}'),
        ranks_groups=True,
        prompt=GROUP,
        min_score=-1,
        max_score=3,
    )
    assert [t.reward for t in paid.trajectories] == [0.0, 1.0, 0.5]
    (body,) = server.asked
    assert body["messages"][0]["content"] == (
        "Q: 2+2?\nAnswer 1:\n4\n\nAnswer 2:\nit is 4\n\nAnswer 3:\nfive"
    )


def test_scores_may_be_found_by_a_pattern():
    paid, _ = judged(lambda body: saying("of 10 I give Score: 2.5"), parser="regex")
    assert [t.reward for t in paid.trajectories] == [0.25] * 3
    paid, _ = judged(
        lambda body: saying("#1: 2\n#2: 8\n#3: 5"),
        parser="regex", pattern=r"#\d: (\d+)", ranks_groups=True, prompt=GROUP,
    )  # fmt: skip
    assert [t.reward for t in paid.trajectories] == [0.2, 0.8, 0.5]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("I would rather not.", {}, "the judge said 'I would rather not.', without a score"),
        ('{"score": "good"}', {}, "the judge's score is 'good': expected a number from 0 to 10"),
        ('{"score": NaN}', {}, "the judge's score is nan"),
        ('{"score": true}', {}, "the judge's score is True"),
        ('{"score": -1}', {}, "the judge's score is -1: expected a number from 0 to 10"),
        ('{"score": 11}', {}, "the judge's score is 11: expected a number from 0 to 10"),
        ('{"scores": [1, 2]}', {"ranks_groups": True, "prompt": GROUP}, "without 3 scores"),
        ("no number", {"parser": "regex"}, "without a score"),
        ("1 2", {"parser": "regex", "ranks_groups": True, "prompt": GROUP}, "without 3 scores"),
        (None, {}, "the judge said '', without a score"),
    ],
)
def test_what_cannot_be_read_costs_the_answers_it_is_about(text, options, message):
    paid, _ = judged(lambda body: saying(text), **options)
    assert all(message in t.error for t in paid.trajectories)
    assert paid.scoring["judge"].errors == 3


def test_one_score_of_a_group_that_is_out_of_range_costs_one_answer():
    paid, _ = judged(lambda body: saying('{"scores": [1, 20, 5]}'), ranks_groups=True, prompt=GROUP)
    assert [t.error is None for t in paid.trajectories] == [True, False, True]


def test_a_judge_without_a_message_and_one_that_is_overloaded():
    paid, _ = judged(lambda body: {"choices": []})
    assert "the server answered without a message" in paid.trajectories[0].error
    paid, _ = judged(lambda body: 503, max_retries=2)
    assert paid.scoring["judge"].retries == 6
    assert "has not answered in 3 attempts" in paid.trajectories[2].error


def test_answers_put_nothing_else_into_the_template():
    """What an answer says is text, also where it looks like a place of the template."""
    given = {"prompt": "{completion}", "completion": "{answer}", "answer": "secret"}
    assert filled("{prompt} {completion} {other} {}", given) == "{completion} {answer} {other} {}"
