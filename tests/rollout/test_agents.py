"""The agents in examples/: each does its task through the recording endpoint."""

from pathlib import Path

import pytest

from nemorl.config.data import DataConfig, GeneratorDataset
from nemorl.config.environment import CustomEnvConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.datasets import load_tasks
from nemorl.data.tokenizer import load_tokenizer
from nemorl.examples.shelves import shelf
from nemorl.models.create import CHAT, create_tiny_model
from tests.required import require_module
from tests.rollout.stand_ins import EchoEngine
from tests.rollout.test_episodes import experiment, sample


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents") / "chat"
    create_tiny_model(folder, CHAT)
    return folder


@pytest.mark.parametrize("agent", ["shelves_openai", "shelves_langgraph"])
@pytest.mark.parametrize(("argument", "reward"), [("part", 1.0), ("piece", 0.0)])
def test_an_agent_calls_the_tool_and_answers(model: Path, agent: str, argument: str, reward: float) -> None:
    if agent == "shelves_langgraph":
        require_module("langgraph")
        require_module("langchain_openai")
    data = DataConfig(
        train=GeneratorDataset(name="generator", function="nemorl.examples.shelves:parts", size=10), chat=True
    )
    env = CustomEnvConfig(name="custom", factory=f"examples.{agent}:Factory")
    own = {"data": data, "env": env, "rewards": ()}
    config = experiment(model, "unused", {}).model_copy(update=own)
    tokenizer = load_tokenizer(PolicyConfig(model_path=model))
    task = load_tasks(data.train, data)[4]
    part, number = task.messages[-1].content, shelf(task.messages[-1].content)
    call = f'<|tool_call_start|>[shelf({argument}="{part}")]<|tool_call_end|>'
    left = [f"{call}<eos>", f"{number if reward else 'no'}<eos>"]
    engine = EchoEngine(lambda request: tokenizer.encode(left.pop(0)))

    group, (trajectory,) = sample(config, engine.generate)

    (summary,) = group.trajectories
    assert (summary.error, summary.reward, summary.num_turns) == (None, reward, 2)
    assert tokenizer.decode(trajectory.tokens[trajectory.loss_mask]).startswith(f"{call}<eos>")
    whole = tokenizer.decode(trajectory.tokens)
    assert whole.startswith(f"<|system|>shelf<eos><|user|>{part}<eos><|assistant|>{call}<eos><|tool|>")
    if reward:
        assert whole.endswith(f"<|tool|>{number}<eos><|assistant|>{number}<eos>")
    else:
        assert "rror" in whole.partition("<|tool|>")[2]
