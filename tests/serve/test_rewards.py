"""The endpoint of a reward model: over a scripted model, and `nemorl serve reward` against transformers."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence

import aiohttp
import pytest
import torch

from nemorl.config.environment import ModelRewardConfig
from nemorl.config.generation import EndpointConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.examples import PLACEHOLDER, Example
from nemorl.data.tokenizer import load_tokenizer, prompts_of
from nemorl.plan.problems import has_chat_template
from nemorl.rewards.compose import Rewards
from nemorl.serve import rewards
from nemorl.serve.app import answering
from nemorl.serve.rewards import Batcher, ServedRewards
from nemorl.session.handles import DeviceScheduler
from nemorl.session.scoring import RewardScorer
from nemorl.trajectories import Message, ToolCall
from tests.data.chat_templates import FAMILIES
from tests.data.tokenizers import save_tokenizer
from tests.rewards.test_compose import TASK, conversation
from tests.serve.conftest import LENGTH, Endpoint, save_model

USER = {"role": "user", "content": "2+2?"}


def says(text: str) -> dict:
    return {"prompt": [USER], "completion": [{"role": "assistant", "content": text}]}


def asked(*texts: str) -> dict:
    return {"model": "taste", "conversations": [says(text) for text in texts]}


def tokens_of(text: str, tokenizer) -> list[int]:
    """The whole conversation by the template, up to and with its end token."""
    whole = tokenizer.render_chat([USER, {"role": "assistant", "content": text}], None, False)
    return tokenizer.encode(whole.rstrip("\n"))


def of_length(n: int) -> Example:
    return Example(PLACEHOLDER.tokens.repeat(n), PLACEHOLDER.loss_mask.repeat(n)).marked_at_end


def served(tokenizer, score, **options) -> ServedRewards:
    settings = {"max_length": LENGTH, "timeout": 20.0}
    return ServedRewards("taste", score, tokenizer, prompts_of(tokenizer, True), **(settings | options))


def talk(rewards: ServedRewards, conversation_with) -> object:
    """What a client's coroutine gives that talks to an endpoint of these rewards."""

    async def main():
        async with (
            answering(EndpointConfig(port=0), rewards.add_routes) as at,
            aiohttp.ClientSession() as http,
        ):
            return await conversation_with(Endpoint(at, http))

    return asyncio.run(main())


async def lengths(examples: Sequence[Example]) -> list[list[float]]:
    """The value after a token is its number, from 1."""
    return [(example.loss_mask.nonzero()[0] + 1.0).tolist() for example in examples]


def test_scores_come_with_what_cannot_be_scored(served_tokenizer):
    async def client(endpoint):
        return await endpoint.post("/rewards", asked("a", "b" * LENGTH, "abc"))

    status, body = talk(served(served_tokenizer, lengths), client)

    assert status == 200
    first, second, third = body["data"]
    expected = len(tokens_of("abc", served_tokenizer))
    assert third == {"index": 2, "reward": float(expected), "num_tokens": expected}
    assert first["reward"] == len(tokens_of("a", served_tokenizer))
    assert second["reward"] is None
    assert f"more than {LENGTH}" in second["error"]


def test_answers_with_calls_are_scored_as_the_template_writes_them(tmp_path):
    family = FAMILIES["qwen2.5"]
    tokenizer = load_tokenizer(PolicyConfig(model_path=save_tokenizer(tmp_path, family.template)))
    call = ToolCall("call00000", "add", {"a": 1, "b": "x"})
    said = [Message("assistant", "Well.", (call,)).as_dict()]
    said += [{"role": "tool", "content": "12", "tool_call_id": call.id, "name": "add"}]
    said += [{"role": "assistant", "content": "It is 3."}]
    body = {"model": "taste", "conversations": [{"prompt": [USER], "completion": said}]}
    body["conversations"].append({"prompt": [USER], "completion": [{"role": "assistant"}]})

    async def client(endpoint):
        return await endpoint.post("/rewards", body)

    _, answer = talk(served(tokenizer, lengths, max_length=1000), client)
    whole = tokenizer.render_chat([USER, *said], None, False)
    assert answer["data"][0]["num_tokens"] == len(tokenizer.encode(whole.rstrip("\n")))
    assert "`content` must be a text" in answer["data"][1]["error"]


def test_steps_are_scored_where_they_end(served_tokenizer):
    tokenizer = served_tokenizer
    said = [{"role": "assistant", "content": "one\n\ntwo"}, {"role": "user", "content": "and?"}]
    said += [{"role": "assistant", "content": ""}]
    body = {"model": "taste", "conversations": [{"prompt": [USER], "completion": said}]}

    async def client(endpoint):
        return await endpoint.post("/rewards", body | {"steps": {"separator": "\n"}})

    _, answer = talk(served(tokenizer, lengths), client)
    # Each step has its separator; what is between turns is the template's; nothing is a step of its own.
    opened = tokenizer.encode(tokenizer.render_chat([USER], None, True))
    one, two = (tokenizer.encode(step) for step in ("one\n", "two\n"))
    between = tokenizer.encode("<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")
    places = [len(opened + one), len(opened + one + two), len(opened + one + two + between) + 1]
    (item,) = answer["data"]
    assert item["steps"] == [
        {"turn": 0, "end": 4, "reward": float(places[0])},
        {"turn": 0, "end": 8, "reward": float(places[1])},
        {"turn": 1, "end": None, "reward": float(places[2])},
    ]
    assert item["reward"] == item["num_tokens"] == places[2]


def test_what_is_asked_together_is_scored_together(monkeypatch):
    monkeypatch.setattr(rewards, "MAX_BATCH", 6)
    calls = []

    async def score(examples):
        calls.append(len(examples))
        return await lengths(examples)

    async def main():
        batcher = Batcher(score)
        running = asyncio.create_task(batcher.run())
        answers = [batcher.ask(of_length(n)) for n in range(1, 12)]
        answers[2].cancel()  # who has gone away is not waited for
        results = await asyncio.gather(*answers, return_exceptions=True)
        running.cancel()
        return results

    told = asyncio.run(main())

    assert calls == [5, 5]
    assert told[:2] + told[3:] == [[float(n)] for n in range(1, 12) if n != 3]
    assert isinstance(told[2], asyncio.CancelledError)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "other", "conversations": [says("a")]}, 404, "`taste` is"),
        (
            {"model": "taste", "conversations": []},
            400,
            "conversations = []: expected a list with a length of at least 1",
        ),
        ({"model": "taste"}, 400, "conversations is missing"),
        ({"model": "taste", "conversations": [{"prompt": [USER]}]}, 400, "completion is missing"),
        (b"{", 400, "The body is not JSON"),
    ],
)
def test_a_request_that_is_wrong_is_refused(served_tokenizer, body, status, message):
    async def client(endpoint):
        return await endpoint.post("/rewards", body)

    answered, told = talk(served(served_tokenizer, lengths), client)
    assert answered == status
    assert message in told["error"]["message"]


def test_a_key_is_required_and_failures_are_reported(served_tokenizer):
    async def fails(examples):
        raise RuntimeError("secret of the machine")

    async def hangs(examples):
        await asyncio.Event().wait()

    async def not_finite(examples):
        return [[float("nan")]] * len(examples)

    async def with_wrong_key(endpoint):
        return await endpoint.post("/rewards", asked("a"), key="wrong")

    async def client(endpoint):
        return await endpoint.post("/rewards", asked("a"))

    assert talk(served(served_tokenizer, lengths), with_wrong_key)[0] == 401
    status, body = talk(served(served_tokenizer, fails), client)
    assert status == 500
    assert "secret" not in str(body)
    status, body = talk(served(served_tokenizer, hangs, timeout=0.1), client)
    assert (status, body["error"]["message"]) == (504, "No scores within 0.1 s.")
    _, body = talk(served(served_tokenizer, not_finite), client)
    assert body["data"] == [{"index": 0, "reward": None, "error": "the model's score is nan"}]


def test_what_does_not_divide_over_the_group_is_filled_up(monkeypatch):
    import ray

    class Group:
        """A stand-in of a `ModelHandle`: the value of a sequence is its length."""

        async def load(self, places, *, kind):
            self.places = places
            assert kind == "examples"

        async def values(self):
            pass

        async def marked_values(self):
            return [[float(place.num_tokens)] for place in self.places]

        async def offload(self):
            pass

        async def reload(self):
            self.settled = True

        async def outlasting(self, work):
            return await work()

    async def scored(group):
        devices = DeviceScheduler([group])
        scores = asyncio.create_task(RewardScorer(group, units=4, devices=devices).score([of_length(3)] * 5))
        await asyncio.sleep(0)
        assert not hasattr(group, "places")  # not before the devices are generation's
        await devices.give_to(None)
        return await scores

    monkeypatch.setattr(ray, "put", lambda sequences: tuple(sequences))
    group = Group()
    assert asyncio.run(RewardScorer(Group(), units=4).score([of_length(3)] * 5)) == [[3.0]] * 5
    assert asyncio.run(scored(group)) == [[3.0]] * 5
    assert group.settled
    assert [place.num_tokens for place in group.places] == [3] * 5 + [1] * 3


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A tiny Llama with a random head of one label, and a chat template."""
    folder = tmp_path_factory.mktemp("reward") / "taste"
    return save_model(folder, 5, "LlamaForSequenceClassification", num_labels=1, pad_token_id=0)


def test_nemorl_serves_the_scores_that_transformers_computes(reward_model, tmp_path, monkeypatch):
    from transformers import AutoModelForSequenceClassification

    assert has_chat_template(reward_model)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "nemorl.cli", "serve", "reward", str(reward_model),
            "generation.endpoint={port: 0}", "cluster.policy_threads=1",
        ],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        told, said = {}, []
        while "key" not in told:
            line = process.stdout.readline()
            assert line, "".join(said)
            said.append(line)
            name, _, value = line.strip().partition(": ")
            told[name] = value
        monkeypatch.setenv("TASTE_KEY", told["key"])
        config = ModelRewardConfig(
            kind="model", url=told["endpoint"], model="taste", api_key_env="TASTE_KEY", batch_size=2
        )
        texts = ["4", "it is four", "", "no"]

        async def score():
            rewards = Rewards([config], {}, chat=True, seconds=60.0)
            try:
                return await rewards.apply(TASK, [conversation(text) for text in texts])
            finally:
                await rewards.close()

        paid = asyncio.run(score())
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()

    tokenizer = load_tokenizer(PolicyConfig(model_path=reward_model))
    network = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    for trajectory, text in zip(paid.trajectories, texts, strict=True):
        with torch.no_grad():
            expected = network(torch.tensor([tokens_of(text, tokenizer)])).logits.item()
        assert trajectory.error is None
        assert trajectory.reward == pytest.approx(expected, abs=1e-5)
    assert len({t.reward for t in paid.trajectories}) == 4
