"""Conversations with tools, turn by turn, against the template applied to the whole of them."""

import asyncio
from pathlib import Path

import pytest

from nemorl.config.data import ArithmeticDataset, DataConfig
from nemorl.config.environment import ToolsEnvConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.tokenizer import ChatPrompts, TemplateError, load_tokenizer
from nemorl.generation.router import Replica, Router
from nemorl.generation.types import SamplingParams
from nemorl.rollout.groups import GroupAssignment
from nemorl.rollout.turn_loop import SampleKey, Sampler, TurnLimits, TurnLoop
from nemorl.rollout.worker import RolloutWorker
from nemorl.trajectories import Message, SingleTurnEnvironment, Step, Task, ToolCall
from tests.data.chat_templates import FAMILIES, QWEN3
from tests.data.tokenizers import CHATML, IM_END, save_tokenizer
from tests.rollout.stand_ins import EchoEngine, ScriptedEnvironment, ScriptedGenerator
from tests.rollout.test_worker import experiment, sample

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}


class ResultsThenQuestion(ScriptedEnvironment):
    """Answers a call with its result, the first answer with a question, and the second one with the end."""

    async def step(self, action):
        self.actions.append(action)
        if action.tool_calls:
            (call,) = action.tool_calls
            return Step((Message("tool", "12", tool_call_id=call.id, name=call.name),), done=False)
        return Step((Message("user", "Again?"),), done=False) if len(self.actions) == 2 else Step()


def said(family, reasoning, content):
    """An assistant's message with the names of fields that the template reads."""
    if not family.reasons:
        return {"role": "assistant", "content": content}
    for field in ("reasoning_content", "thinking"):
        if field in family.template:
            return {"role": "assistant", "content": content, field: reasoning}
    return {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{content}"}


def by_hand(family, ids):
    """The conversation as transformers takes it."""
    arguments = {"a": 1, "b": "x"}
    if "｜" in family.template:
        arguments = '{"a": 1, "b": "x"}'
    messages = []
    for question, call_id in zip(("1+x?", "Again?"), ids, strict=True):
        call = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages += [
            {"role": "user", "content": question},
            said(family, "Hm.", "Well." if "Well." in family.call else "") | {"tool_calls": [call]},
            {"role": "tool", "content": "12", "tool_call_id": call_id, "name": "add"},
            said(family, "So.", "It is 3."),
        ]
    return messages


@pytest.mark.parametrize("name", FAMILIES)
def test_every_prompt_is_the_template_of_the_whole_and_every_token_trains_once(tmp_path, name):
    family = FAMILIES[name]
    tokenizer = load_tokenizer(
        PolicyConfig(model_path=save_tokenizer(tmp_path, family.template, family.special))
    )
    turns = [family.call + family.call_end, family.answer + family.end] * 2
    if name == "mistral":  # whose calls have identifiers
        turns[0], turns[2] = (
            turns[0].replace('"x"}}', f'"x"}}, "id": "{call_id}"}}') for call_id in ("t00000000", "t00200000")
        )
    sampled = [tokenizer.encode(turn) for turn in turns]
    generator, environment = ScriptedGenerator(sampled), ResultsThenQuestion([])
    environment.tools = [ADD]
    limits = TurnLimits(4000, 1000, tokenizer.end_token_ids, (), 10.0, 10.0)
    loop = TurnLoop(Sampler(generator, tokenizer, ChatPrompts(tokenizer), limits))
    task = Task(0, (Message("user", "1+x?"),))
    (conversation,) = asyncio.run(loop.run(task, environment, SampleKey(1, 0, 0), SamplingParams()))
    assert conversation.trajectory.error is None

    messages = by_hand(family, ("t00000000", "t00200000"))
    before_turns = [position for position, m in enumerate(messages) if m["role"] == "assistant"]
    for request, position in zip(generator.requests, before_turns, strict=True):
        whole = tokenizer._backend.apply_chat_template(
            messages[:position], tools=[ADD], tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(request.prompt.tolist()) == whole

    sequences = (*conversation.earlier, conversation.trajectory)
    assert tuple(len(one.turns) for one in sequences) == family.branches
    trained = [token for one in sequences for token in one.tokens[one.loss_mask].tolist()]
    assert trained == [token for turn in sampled for token in turn]
    # Each turn trains in the context in which it was sampled.
    contexts = [one.tokens[: turn.start].tolist() for one in sequences for turn in one.turns]
    assert contexts == [request.prompt.tolist() for request in generator.requests]


def test_a_single_answer_may_call_the_tools_of_its_task(tmp_path):
    family = FAMILIES["qwen2.5"]
    tokenizer = load_tokenizer(PolicyConfig(model_path=save_tokenizer(tmp_path, family.template)))
    generator = ScriptedGenerator([tokenizer.encode(family.call + family.call_end)])
    limits = TurnLimits(4000, 1000, tokenizer.end_token_ids, (), 10.0, 10.0)
    loop = TurnLoop(Sampler(generator, tokenizer, ChatPrompts(tokenizer), limits))
    task = Task(0, (Message("user", "1+x?"),), tools=(ADD,))
    key, sampling = SampleKey(1, 0, 0), SamplingParams()
    (conversation,) = asyncio.run(loop.run(task, SingleTurnEnvironment(), key, sampling))
    asked = [{"role": "user", "content": "1+x?"}]
    (request,) = generator.requests
    assert tokenizer.decode(request.prompt.tolist()) == tokenizer._backend.apply_chat_template(
        asked, tools=[ADD], tokenize=False, add_generation_prompt=True
    )
    (answer,) = conversation.exchange
    assert answer.tool_calls == (ToolCall("t00000000", "add", {"a": 1, "b": "x"}),)


def worker_with_tools(folder: Path, engine: EchoEngine, store) -> RolloutWorker:
    config = experiment(
        folder,
        policy=PolicyConfig(model_path=folder, max_sequence_length=2000),
        data=DataConfig(train=ArithmeticDataset(name="arithmetic", digits=1, size=50), chat=True),
        env=ToolsEnvConfig(
            name="tools", tools=("tests.environments.test_tools:multiply",), answer="equal", weight=3.0
        ),
        rewards=(),
    )
    return RolloutWorker(config, Router([Replica("echo", engine.generate)]), store)


def test_the_branches_of_a_sample_share_its_reward(tmp_path):
    folder = save_tokenizer(tmp_path, QWEN3)
    tokenizer = load_tokenizer(PolicyConfig(model_path=folder))
    stored = []

    def answer(request):
        """A call that no one can read, and, with what is wrong with it, the sum."""
        prompt = tokenizer.decode(request.prompt.tolist())
        if "cannot be read" not in prompt:
            return [*tokenizer.encode("<think>\nHm.\n</think>\n\n<tool_call>7*</tool_call>"), IM_END]
        assert "Hm." not in prompt
        left, right = prompt.partition("=<|im_end|>")[0].rpartition("user\n")[2].split("+")
        return [*tokenizer.encode(f"<think>\nSo.\n</think>\n\n{int(left) + int(right)}"), IM_END]

    worker = worker_with_tools(folder, EchoEngine(answer), lambda all_of_it: stored.append(all_of_it) or 0)
    (summary,) = sample(worker, [GroupAssignment(0, 4, num_samples=2)])
    for member in summary.trajectories:
        assert (member.error, member.reward, member.num_turns) == (None, 3.0, 2)
        assert [len(branch.turn_rewards) for branch in member.branches] == [1, 1]
    assert [branch.row for member in summary.trajectories for branch in member.branches] == [0, 1, 2, 3]
    (sequences,) = stored
    assert [one.num_sampled for one in sequences] == [int(one.loss_mask.sum()) for one in sequences]


def test_a_template_without_tools_is_refused_before_the_first_sample(tmp_path):
    with pytest.raises(TemplateError, match="no known format of tool calls"):
        worker_with_tools(save_tokenizer(tmp_path, CHATML), EchoEngine(lambda request: []), len)
