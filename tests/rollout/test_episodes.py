"""Agents that own their loop: the same task in three shapes, branches, rewards, limits and failures."""

import asyncio
import sys
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import numpy as np
import pytest
import ray
import torch
from aiohttp import ClientSession
from openai import AsyncOpenAI
from transformers import LlamaConfig, LlamaForCausalLM

from nemorl.algorithms.metrics import rollout_metrics
from nemorl.algorithms.objective import EntropyWeight
from nemorl.algorithms.policy_gradient import PolicyGradientUpdate
from nemorl.config.algorithm import OnlineConfig
from nemorl.config.data import ArithmeticDataset, DataConfig
from nemorl.config.environment import (
    CustomEnvConfig,
    FunctionRewardConfig,
    JudgeRewardConfig,
    ProgramEnvConfig,
)
from nemorl.config.experiment import Experiment
from nemorl.config.generation import SamplingConfig, TorchGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig, DeadlineConfig
from nemorl.data.datasets import load_tasks
from nemorl.data.losses import TrainStats
from nemorl.generation.router import Replica, Router
from nemorl.generation.torch_engine.engine import TorchHost
from nemorl.generation.types import EngineOptions
from nemorl.megatron.worker import PolicyWorker
from nemorl.rollout.groups import GroupAssignment, GroupSummary
from nemorl.rollout.worker import RolloutWorker
from nemorl.trajectories import (
    Action,
    Environment,
    EnvironmentFactory,
    Episode,
    EpisodeEnvironment,
    Message,
    Model,
    Step,
    StopReason,
    Task,
    Trajectory,
)
from tests.algorithms.local_session import LocalLearner, Stored, start_host
from tests.data.tokenizers import IM_END, save_tokenizer
from tests.rewards.stand_in import KEY, listening
from tests.rollout.stand_ins import EchoEngine

TURNS = 3


def question(turn: int) -> str:
    return f"12 and ab {turn}"


def reward(text: str) -> float:
    return len(text) / 10


class StepDriven(Environment):
    def __init__(self) -> None:
        self._turns = 0

    async def step(self, action: Action) -> Step:
        self._turns += 1
        messages = (Message("user", question(self._turns)),)
        return Step(messages, {"length": reward(action.text)}, done=self._turns == TURNS)

    async def close(self) -> None:
        pass


class EpisodeDriven(EpisodeEnvironment):
    async def run(self, task: Task, model: Model) -> Episode:
        messages, rewards = list(task.messages), {}
        for turn in range(1, TURNS + 1):
            answer = await model.chat(messages)
            rewards[answer.id] = {"length": reward(answer.text)}
            if answer.stop is StopReason.LENGTH:
                break
            messages += [answer.message, Message("user", question(turn))]
        return Episode(answer_rewards=rewards)


class OverHttp(EpisodeEnvironment):
    """The same with OpenAI's client, and a stream in the middle."""

    urls: ClassVar[list[str]] = []

    async def run(self, task: Task, model: Model) -> Episode:
        self.urls.append(model.base_url)
        client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)
        messages: list[Any] = [{"role": m.role, "content": m.content} for m in task.messages]
        for turn in range(1, TURNS + 1):
            if turn == 2:
                text = ""
                async for chunk in await client.chat.completions.create(
                    model=model.name, messages=messages, stream=True
                ):
                    name, text = chunk.id, text + (chunk.choices[0].delta.content or "")
                    finish = chunk.choices[0].finish_reason
            else:
                answer = await client.chat.completions.create(model=model.name, messages=messages)
                name, text = answer.id, answer.choices[0].message.content or ""
                finish = answer.choices[0].finish_reason
            body = {"rewards": {"length": reward(text)}, "id": name}
            await client.post("/rewards", cast_to=object, body=body)
            if finish == "length":
                break
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question(turn)}]
        return Episode()


class Factory(EnvironmentFactory):
    """Environments of a class of this module."""

    def __init__(self, shape: str, **options: Any) -> None:
        self.reward_weights = {"length": 1.0}
        self._shape, self._options = globals()[shape], options

    def create(self) -> Any:
        return self._shape(**self._options)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that ends turns often."""
    folder = tmp_path_factory.mktemp("chat_model")
    save_tokenizer(folder)
    torch.manual_seed(3)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, eos_token_id=IM_END,
            tie_word_embeddings=False, initializer_range=0.3,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


def experiment(folder: Path, shape: str, options: dict[str, Any], **env: Any) -> Experiment:
    custom = {"name": "custom", "factory": f"{__name__}:Factory", "options": {"shape": shape, **options}}
    counts = {"num_steps": 1, "num_prompts_per_step": 1, "num_generations_per_prompt": 2}
    return Experiment(
        run_dir=Path("unused"),
        policy=PolicyConfig(model_path=folder, max_sequence_length=512),
        generation=TorchGenerationConfig(
            max_new_tokens=60,
            sampling=SamplingConfig(temperature=0.8),
            stop_strings=("a", "e", "1", "\n"),  # a random model rarely says its end token
        ),
        data=DataConfig(train=ArithmeticDataset(name="arithmetic", digits=1, size=50)),
        env=CustomEnvConfig.model_validate({**custom, **env}),
        cluster=ClusterConfig(deadlines=DeadlineConfig(environment=20.0)),
        algorithm=OnlineConfig.model_validate({"name": "grpo", **counts}),
        rewards=(FunctionRewardConfig(function=f"{__name__}:seen"),),
    )


SEEN: list[dict[str, Any]] = []


def seen(**columns: list[Any]) -> list[float]:
    """A reward function that keeps what it is given."""
    SEEN.append(columns)
    return [0.0] * len(columns["completions"])


def sample(
    config: Experiment, generate: Any, num_samples: int = 1, num_texts: int = 0
) -> tuple[GroupSummary, list[Trajectory]]:
    """A group of the first task, and its sequences."""
    SEEN.clear()

    async def main() -> GroupSummary:
        worker = RolloutWorker(config, Router([Replica("engine", generate)]), store=Stored)
        try:
            (group,) = [
                g async for g in worker.run_groups([GroupAssignment(5, 4, num_samples, num_texts=num_texts)])
            ]
        finally:
            await worker.close()
        assert isinstance(group, GroupSummary)
        return group

    group = asyncio.run(asyncio.wait_for(main(), 120))
    return group, list(group.reference)


def scripted(tokenizer: Any, *texts: str) -> EchoEngine:
    """An engine that answers with these texts, call by call."""
    left = list(texts)
    return EchoEngine(lambda request: [*tokenizer.encode(left.pop(0)), IM_END])


class TestShapes:
    def test_the_three_shapes_give_the_same_trajectories_and_loss(
        self, chat_model: Path, tmp_path: Path
    ) -> None:
        found = {}
        for shape in ("StepDriven", "EpisodeDriven", "OverHttp"):
            options = EngineOptions(chat_model, chat_model, 512, threads=1, commit_seconds=60)
            engine = TorchHost(TorchGenerationConfig(max_new_tokens=60), options)
            try:
                found[shape] = sample(experiment(chat_model, shape, {}), engine.generate_batches, 3)
            finally:
                engine.close()
        group, trajectories = found.pop("StepDriven")
        assert [t.num_turns for t in group.trajectories] == [TURNS] * 3
        assert len({t.tokens.tobytes() for t in trajectories}) == 3
        for other, same in found.values():
            for a, b in zip(trajectories, same, strict=True):
                assert a.error is b.error is None
                for name in ("tokens", "loss_mask", "logprobs", "versions"):
                    assert np.array_equal(getattr(a, name), getattr(b, name))
                assert (a.turns, a.rewards, a.reward, a.stop) == (b.turns, b.rewards, b.reward, b.stop)
            for c, d in zip(group.trajectories, other.trajectories, strict=True):
                assert (c.turn_rewards, c.num_sampled, c.branches) == (d.turn_rewards, d.num_sampled, ())
        config = experiment(chat_model, "StepDriven", {})
        host = start_host(config, tmp_path)
        try:
            updates = [updated(config, host, one) for one in (group, *(other for other, _ in found.values()))]
        finally:
            host.close()
        assert updates[0].grad_norm > 0
        assert updates[0].sums["loss/policy"] != 0
        assert updates == [updates[0]] * 3

    def test_stop_strings_of_a_request_leave_the_conversation_one_sequence(self, chat_model, tokenizer):
        engine = scripted(tokenizer, "7 END", "9")
        _, (trajectory,) = sample(experiment(chat_model, "StopsEarly", {}), engine.generate)
        assert [t.stop for t in trajectory.turns] == [StopReason.STOP, StopReason.STOP]
        assert tokenizer.decode(trajectory.tokens[trajectory.loss_mask]) == "7 END<|im_end|>9<|im_end|>"


def updated(config: Experiment, host: PolicyWorker, group: GroupSummary) -> TrainStats:
    """The first update of a run, on this group."""
    algorithm = config.algorithm
    assert isinstance(algorithm, OnlineConfig)
    host.load_hf(config.policy.model_path)
    batch = PolicyGradientUpdate(algorithm, EntropyWeight.of(algorithm.entropy)).prepare([group], 1)
    learner = LocalLearner(host, config.policy.micro_batch_tokens)

    async def update() -> TrainStats:
        await learner.load(batch.sequences, kind="trajectories")
        return await learner.train(batch.losses["policy"])

    return asyncio.run(update())


class StopsEarly(EpisodeEnvironment):
    async def run(self, task: Task, model: Model) -> Episode:
        client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "a"}]
        for _ in range(2):
            answer = await client.chat.completions.create(model=model.name, messages=messages, stop=["END"])
            text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "b"}]
        return Episode()


class Delegates(EpisodeEnvironment):
    """Two sub-agents at a time, then the main agent, which forgets its first answer at the end."""

    async def run(self, task: Task, model: Model) -> Episode:
        first = await model.chat([Message("user", "plan")])
        subs = await asyncio.gather(*(model.chat([Message("user", f"do {n}")]) for n in (1, 2)))
        results = [Message("user", "plan"), first.message, Message("user", subs[0].text + subs[1].text)]
        second = await model.chat(results)
        third = await model.chat([Message("user", "sum up"), second.message, Message("user", "end")])
        rewards = {subs[0].id: {"length": 0.25}, third.id: {"length": 0.5}}
        return Episode({"length": 1.0}, rewards, columns={"note": "three agents"})


class TestBranches:
    def test_agents_that_share_nothing_are_branches_of_one_sample(self, chat_model, tokenizer) -> None:
        engine = scripted(tokenizer, "plan", "two", "one", "main", "end")  # newest first in one batch
        group, trajectories = sample(experiment(chat_model, "Delegates", {}), engine.generate)
        trained = [tokenizer.decode(t.tokens[t.loss_mask]) for t in trajectories]
        assert trained == [f"{said}<|im_end|>" for said in ("one", "two", "plan<|im_end|>main", "end")]
        (summary,) = group.trajectories
        assert [b.turn_rewards for b in summary.branches] == [(0.25,), (0.0,), (0.0, 0.0), (1.5,)]
        assert (summary.reward, summary.num_turns) == (1.75, 5)
        assert summary.num_sampled == sum(int(t.loss_mask.sum()) for t in trajectories)
        (columns,) = SEEN
        assert columns["note"] == ["three agents"]
        assert tokenizer.decode(columns["sampled_ids"][0]) == "".join(trained)
        assert [m["content"] for m in columns["completions"][0]] == ["end"]  # of the last branch

    def test_text_completions_continue_each_other_too(self, chat_model, tokenizer) -> None:
        one, two = tokenizer.encode("1")[0], tokenizer.encode("2")[0]
        answers = [[one, two], tokenizer.encode("ab"), tokenizer.encode("x")]  # "12" is one token
        engine = EchoEngine(lambda request: answers.pop(0))
        _, trajectories = sample(experiment(chat_model, "Completes", {}), engine.generate)
        assert [t.tokens.tolist() for t in trajectories] == [
            [*tokenizer.encode("say "), one, two, *tokenizer.encode(", "), *tokenizer.encode("ab")],
            [5, 6, *tokenizer.encode("x")],
        ]
        assert [int(t.loss_mask.sum()) for t in trajectories] == [2 + len(tokenizer.encode("ab")), 1]


class Completes(EpisodeEnvironment):
    async def run(self, task: Task, model: Model) -> Episode:
        client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)
        first = await client.completions.create(model=model.name, prompt="say ")
        await client.completions.create(model=model.name, prompt=f"say {first.choices[0].text}, ")
        await client.completions.create(model=model.name, prompt=[5, 6])
        return Episode()


def test_a_program_samples_through_the_endpoint(chat_model, tokenizer) -> None:
    """The shipped example: the first answer is wrong, the second one right."""
    program = Path(__file__).parents[2] / "examples" / "second_try_program.py"
    command = (sys.executable, str(program))
    config = experiment(chat_model, "EpisodeDriven", {}).model_copy(
        update={"env": ProgramEnvConfig(name="program", command=command, weights={"right": 1.0})}
    )
    task = load_tasks(config.data.train, config.data)[4]
    question, answer, wrong = task.messages[-1].content, task.answer, ["no"]
    engine = EchoEngine(lambda request: tokenizer.encode(wrong.pop() if wrong else answer))
    group, (trajectory,) = sample(config, engine.generate)
    assert tokenizer.decode(trajectory.tokens) == f"{question}no{question}{answer}"
    assert tokenizer.decode(trajectory.tokens[trajectory.loss_mask]) == f"no{answer}"
    assert group.trajectories[0].reward == 0.5


class Reports(EpisodeEnvironment):
    """Keeps what the endpoint answers to requests that it must refuse."""

    refusals: ClassVar[list[tuple[int, str]]] = []

    async def run(self, task: Task, model: Model) -> Episode:
        chat = {"model": model.name, "messages": [{"role": "user", "content": "a"}]}
        async with ClientSession() as client:
            for path, key, body in [
                ("chat/completions", "wrong", chat),
                ("chat/completions", model.api_key, {**chat, "temperature": 0.5}),
                ("chat/completions", model.api_key, {**chat, "seed": 1}),
                ("rewards", "wrong", {"rewards": {"length": 1.0}}),
                ("rewards", model.api_key, {"rewards": {"beauty": 1.0}}),
                ("rewards", model.api_key, {"rewards": {"length": 1.0}, "id": "chatcmpl-9"}),
                ("rewards", model.api_key, {"rewards": {}}),
            ]:
                self.refusals.append(await posted(client, f"{model.base_url}/{path}", key, body))
            other = model.base_url.rsplit("/", 2)[0] + "/0123456789abcdef/v1"
            self.refusals.append(await posted(client, f"{other}/rewards", model.api_key, {}))
        await model.chat([Message("user", "a")])
        return Episode()


async def posted(client: ClientSession, url: str, key: str, body: Any) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"}
    async with client.post(url, json=body, headers=headers) as response:
        return response.status, str((await response.json())["error"]["message"])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_agents_elsewhere_reach_the_address_of_this_machine(chat_model, tokenizer, host) -> None:
    """The key of an episode is required at any address: `test_what_the_endpoint_refuses`."""
    OverHttp.urls.clear()
    own = {"127.0.0.1": "127.0.0.1", "0.0.0.0": ray.util.get_node_ip_address()}
    engine = scripted(tokenizer, *["x"] * TURNS)
    group, _ = sample(experiment(chat_model, "OverHttp", {}, endpoint_host=host), engine.generate)
    assert (group.trajectories[0].error, group.trajectories[0].num_turns) == (None, TURNS)
    assert [urlsplit(url).hostname for url in OverHttp.urls] == [own[host]]


def test_what_the_endpoint_refuses(chat_model, tokenizer) -> None:
    Reports.refusals.clear()
    group, _ = sample(experiment(chat_model, "Reports", {}), scripted(tokenizer, "x").generate)
    statuses, messages = zip(*Reports.refusals, strict=True)
    assert statuses == (401, 400, 400, 401, 400, 400, 400, 401)
    assert "temperature = 0.5: the run samples with 0.8" in messages[1]
    assert "seed = 1: the run sets it" in messages[2]
    assert "rewards.beauty has no weight in the configuration; there are: length" in messages[4]
    assert "id = chatcmpl-9: the model gave no such answer" in messages[5]
    assert (group.trajectories[0].error, group.trajectories[0].reward) == (None, 0.0)


class CallsTools(EpisodeEnvironment):
    """Answers with tools over HTTP; clients send calls back with arguments as they like."""

    async def run(self, task: Task, model: Model) -> Episode:
        client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)
        tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        messages: list[Any] = [{"role": "user", "content": "a"}]
        one = await client.chat.completions.create(model=model.name, messages=messages, tools=[tool])
        said = one.choices[0].message
        (call,) = said.tool_calls or ()
        messages += [said.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"}]
        await client.chat.completions.create(model=model.name, messages=messages, tools=[tool])
        return Episode({"length": float(call.function.name == "add")})


TOOLS_TEMPLATE = (
    "{% if tools %}<tool_call> {% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_tool_calls_are_kept_as_they_were_sampled(tmp_path, tokenizer) -> None:
    folder = save_tokenizer(tmp_path, TOOLS_TEMPLATE)
    call = '<tool_call>{"arguments":{"b":2,  "a":1}, "name":"add"}</tool_call>'
    engine = scripted(tokenizer, call, "12")
    group, (trajectory,) = sample(experiment(folder, "CallsTools", {}), engine.generate)
    assert tokenizer.decode(trajectory.tokens[trajectory.loss_mask]) == f"{call}<|im_end|>12<|im_end|>"
    assert "<|im_start|>tool\n3<|im_end|>" in tokenizer.decode(trajectory.tokens)
    assert group.trajectories[0].reward == 1.0


class Misbehaves(EpisodeEnvironment):
    """Does what its option says after a number of calls."""

    def __init__(self, does: str, after: int = 1) -> None:
        self._does, self._after = does, after

    async def run(self, task: Task, model: Model) -> Episode:
        for _ in range(self._after):
            await model.chat([Message("user", "a")])
        if self._does == "hang":
            await asyncio.Event().wait()
        if self._does == "raise":
            raise LookupError("no tool")
        if self._does == "exit":
            raise SystemExit(3)
        if self._does == "nan":
            return Episode(answer_rewards={"call-1": {"length": float("nan")}})
        return Episode(answer_rewards={"call-9": {"length": 1.0}}) if self._does == "name" else None  # type: ignore[return-value]


class TestFailures:
    @pytest.mark.parametrize(
        ("does", "after", "problem"),
        [
            ("raise", 1, "environment run: LookupError: no tool"),
            ("raise", 0, "environment run: LookupError: no tool"),
            ("exit", 1, "environment run: RuntimeError: SystemExit: 3"),
            ("nan", 1, "environment run: TypeError: gave the reward 'length' the value nan; return a finite"),
            ("hang", 1, "environment run: TimeoutError: no call of the model and no end within"),
            ("name", 1, "environment run: ValueError: rewards of the answer call-9, which the model did not"),
            ("name", 0, "environment run: ValueError: it ended without a call of the model"),
            ("return", 1, "environment run: TypeError: it returned None; return an Episode"),
        ],
    )
    def test_a_failed_episode_is_sampled_again_and_then_skipped(
        self, chat_model, tokenizer, does, after, problem
    ) -> None:
        engine = scripted(tokenizer, *["x"] * 4)
        limits = {"environment_seconds": 0.2}
        config = experiment(chat_model, "Misbehaves", {"does": does, "after": after}, limits=limits)
        group, trajectories = sample(config, engine.generate)
        (summary,) = group.trajectories
        assert summary.error is not None
        assert summary.error.startswith(problem)
        assert (summary.environment_failed, summary.num_retries, summary.trains) == (True, 1, False)
        assert summary.num_sampled == 2 * after
        assert not any(t.loss_mask.any() for t in trajectories)

    def test_with_zero_it_trains_as_far_as_it_came(self, chat_model, tokenizer) -> None:
        config = experiment(chat_model, "Misbehaves", {"does": "raise"}, on_error="zero", max_retries=0)
        group, (trajectory,) = sample(config, scripted(tokenizer, "x").generate)
        assert (group.trajectories[0].rewards["length"], int(trajectory.loss_mask.sum())) == (0.0, 2)

    def test_a_lost_engine_ends_the_call(self, chat_model) -> None:
        async def dead(requests: Any) -> Any:
            raise ConnectionError("killed")
            yield

        with pytest.raises(Exception, match="killed"):
            sample(experiment(chat_model, "Misbehaves", {"does": "return"}), dead)


class TestLimits:
    @pytest.mark.parametrize(
        ("limits", "num_turns", "num_sampled"),
        [({"max_calls": 2}, 2, 6), ({"max_tokens": 4}, 2, 4), ({"max_tokens": 3}, 1, 3)],
    )
    @pytest.mark.parametrize("shape", ["StepDriven", "EpisodeDriven", "OverHttp"])
    def test_a_truncated_episode_trains_with_what_it_has(
        self, chat_model, tokenizer, shape, limits, num_turns, num_sampled
    ) -> None:
        engine = EchoEngine(lambda r: [*tokenizer.encode("xy"), IM_END][: r.max_new_tokens])
        group, _ = sample(experiment(chat_model, shape, {}, limits=limits), engine.generate)
        (summary,) = group.trajectories
        assert (summary.error, summary.stop, summary.truncated) == (None, StopReason.LENGTH, True)
        assert (summary.num_turns, summary.num_sampled) == (num_turns, num_sampled)
        assert rollout_metrics([group], 1)["environment/truncated"] == 1.0

    @pytest.mark.parametrize("shape", ["EpisodeDriven", "OverHttp"])
    def test_the_time_of_calls_of_the_model_ends_an_episode(self, chat_model, tokenizer, shape) -> None:
        async def slow(requests: Any) -> Any:
            await asyncio.sleep(0.15)
            async for completions in scripted(tokenizer, "xy").generate(requests):
                yield completions

        config = experiment(chat_model, shape, {}, limits={"model_seconds": 0.1})
        group, _ = sample(config, slow)
        (summary,) = group.trajectories
        assert (summary.error, summary.stop, summary.truncated) == (None, StopReason.LENGTH, True)
        assert summary.num_turns == 1


def test_a_judge_scores_a_recorded_episode(chat_model, tokenizer, monkeypatch) -> None:
    """Each sample is judged by the conversation that its last branch has."""
    monkeypatch.setenv("JUDGE_KEY", KEY)

    def answer(body: Any) -> Any:
        said = body["messages"][-1]["content"]
        score = {"A: bbb": 3, "A: c": 1}[said]
        return {"choices": [{"message": {"role": "assistant", "content": f'{{"score": {score}}}'}}]}

    async def main() -> GroupSummary:
        async with listening(answer) as server:
            judge = JudgeRewardConfig(
                kind="judge", name="judge", url=server.url, model="m", api_key_env="JUDGE_KEY",
                prompt="A: {completion}", weight=2.0,
            )  # fmt: skip
            config = experiment(chat_model, "AnswersTwice", {}).model_copy(update={"rewards": (judge,)})
            # Two samples; the calls of both are answered together, newest first.
            engine = scripted(tokenizer, "x", "x", "c", "bbb")
            worker = RolloutWorker(config, Router([Replica("engine", engine.generate)]), store=Stored)
            try:
                (group,) = [g async for g in worker.run_groups([GroupAssignment(5, 4, 2)])]
            finally:
                await worker.close()
            assert isinstance(group, GroupSummary)
            return group

    group = asyncio.run(asyncio.wait_for(main(), 120))
    assert [t.error for t in group.trajectories] == [None, None]
    # Scores are of 10, and the weight of the judge is 2; the environment has given 0.5.
    found = sorted((t.rewards["judge"], t.rewards["length"], t.reward) for t in group.trajectories)
    assert found == [pytest.approx(one) for one in [(0.1, 0.5, 0.7), (0.3, 0.5, 1.1)]]


class AnswersTwice(EpisodeEnvironment):
    """Plans, and then answers without the plan: two branches."""

    async def run(self, task: Task, model: Model) -> Episode:
        await model.chat([Message("user", "plan")])
        await model.chat([Message("user", "answer")])
        return Episode({"length": 0.5})
