"""Rewards of a model behind a URL, against a stand-in of the server; faults are made there."""

import asyncio

import pytest

from nemorl.config.environment import ModelRewardConfig
from nemorl.rewards.compose import Rewards
from nemorl.rewards.find import RewardError
from tests.rewards.stand_in import KEY, listening
from tests.rewards.test_compose import TASK, conversation

SAID = [conversation(text) for text in ("a", "bbb", "cc", "dddd", "e")]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("REWARD_KEY", KEY)


def by_length(body):
    """The length of what was said is its score."""
    said = [c["completion"][-1]["content"] for c in body["conversations"]]
    return {"data": [{"index": i, "reward": float(len(text))} for i, text in enumerate(said)]}


def scored(answer, *, chat=True, said=SAID, groups=1, prepare=lambda server: None, **options):
    """What groups are rewarded by a model at the stand-in, and what that was asked."""

    async def main():
        async with listening(answer) as server:
            prepare(server)
            config = {"url": server.url, "model": "taste", "api_key_env": "REWARD_KEY", **options}
            rewards = Rewards([ModelRewardConfig(kind="model", **config)], {}, chat, seconds=20.0)
            try:
                paid = await asyncio.gather(*(rewards.apply(TASK, said) for _ in range(groups)))
            finally:
                await rewards.close()
            server.paid = paid
            return paid[0], server

    return asyncio.run(main())


def test_answers_go_in_batches_and_come_back_in_order():
    paid, server = scored(by_length, batch_size=2, weight=0.5)

    assert [t.rewards["model"] for t in paid.trajectories] == [1.0, 3.0, 2.0, 4.0, 1.0]
    assert [t.reward for t in paid.trajectories] == [0.5, 1.5, 1.0, 2.0, 0.5]
    assert sorted(len(body["conversations"]) for body in server.asked) == [1, 2, 2]
    assert set(server.paths) == {"/v1/rewards"}
    first = next(body for body in server.asked if len(body["conversations"]) == 1)
    assert first == {
        "model": "taste",
        "conversations": [
            {
                "prompt": [{"role": "user", "content": "2+2?"}],
                "completion": [{"role": "assistant", "content": "e"}],
            }
        ],
    }
    assert paid.scoring["model"].errors == 0
    assert paid.scoring["model"].retries == 0


def test_requests_are_bounded_over_groups():
    _, server = scored(by_length, batch_size=1, max_concurrent=2, groups=4)
    assert len(server.asked) == 20
    assert server.most_at_once == 2
    # Who waits does so for a place, not for an answer, so that no deadline runs.
    scoring = [paid.scoring["model"] for paid in server.paid]
    assert sum(s.waited for s in scoring) > sum(s.seconds for s in scoring)


@pytest.mark.parametrize("chat", [True, False])
def test_vllm_is_asked_for_scores_without_its_activation(chat):
    """As its `ClassificationRequest` and `ClassificationResponse` have it."""

    def classify(body):
        texts = [body["messages"][-1]["content"]] if "messages" in body else body["input"]
        return {
            "data": [
                {"index": i, "label": "LABEL_0", "probs": [len(t)], "num_classes": 1}
                for i, t in enumerate(texts)
            ]
        }

    paid, server = scored(classify, chat=chat, protocol="vllm")

    offset = 0.0 if chat else float(len("2+2?"))
    assert [t.reward - offset for t in paid.trajectories] == [1.0, 3.0, 2.0, 4.0, 1.0]
    assert len(server.asked) == (5 if chat else 1)
    assert all(body["use_activation"] is False for body in server.asked)
    if chat:
        assert {body["add_generation_prompt"] for body in server.asked} == {False}


def test_what_passes_is_tried_again_and_counted():
    statuses = iter([503, 429])

    paid, server = scored(lambda body: next(statuses, None) or by_length(body))

    assert [t.error for t in paid.trajectories] == [None] * 5
    assert paid.scoring["model"].retries == 2
    assert len(server.asked) == 3


def nan_for_one(body):
    found = by_length(body)
    found["data"][1]["reward"] = float("nan")
    return found


def error_for_one(body):
    found = by_length(body)
    found["data"][1] = {"index": 1, "reward": None, "error": "it has 9 tokens, more than 8"}
    return found


@pytest.mark.parametrize(
    ("answer", "options", "message", "lost"),
    [
        (
            lambda _: 500,
            {"max_retries": 1},
            "has not answered in 2 attempts; the last: status 500: not now",
            5,
        ),
        (lambda _: "no json", {"max_retries": 0}, "JSONDecodeError", 5),
        (
            lambda _: {"data": [{"reward": 1.0}]},
            {},
            "to 5 conversations: expected a list `data` with one item each",
            5,
        ),
        (lambda _: {"object": "list"}, {}, "expected a list `data` with one item each", 5),
        (nan_for_one, {}, "the server's score is nan: expected a finite number", 1),
        (error_for_one, {}, "reward `model`: it has 9 tokens, more than 8", 1),
        (by_length, {"api_key_env": None}, "answered status 401: A key is required", 5),
        (by_length, {"url": "http://127.0.0.1:9/v1", "max_retries": 0}, "ClientConnectorError", 5),
    ],
    ids=[
        "failing",
        "no JSON",
        "too few",
        "another shape",
        "NaN",
        "an error of one",
        "a wrong key",
        "nobody there",
    ],
)
def test_a_fault_costs_its_answers_or_the_run(answer, options, message, lost):
    paid, _ = scored(answer, **options)

    errors = [t.error for t in paid.trajectories if t.error is not None]
    assert len(errors) == paid.scoring["model"].errors == lost
    assert all(message in error for error in errors)
    assert [t.loss_mask.any() for t in paid.trajectories].count(False) == lost
    with pytest.raises(RewardError) as refused:
        scored(answer, on_error="fail", **options)
    assert message in str(refused.value)


def test_a_slow_server_costs_its_answers_at_the_deadline():
    def hold(server):
        server.held = asyncio.Event()

    paid, _ = scored(by_length, prepare=hold, deadline=0.1)

    assert {t.error for t in paid.trajectories} == {"reward `model`: no answer within 0.1 s"}


def test_a_key_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("REWARD_KEY")
    with pytest.raises(
        RewardError, match=r"rewards \(model\): api_key_env = REWARD_KEY: this environment var"
    ):
        scored(by_length)
