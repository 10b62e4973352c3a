"""The environment `nemo_gym` against real servers of the package `nemo_gym`, with the recording endpoint."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.data import DataConfig, GeneratorDataset
from nemorl.config.experiment import Experiment
from nemorl.config.server_environments import NemoGymEnvConfig
from nemorl.environments.nemo_gym import NemoGymFactory
from nemorl.trajectories import EnvironmentLost
from tests.data.tokenizers import save_tokenizer
from tests.environments.episodes import task
from tests.environments.servers import free_port, python_with, running
from tests.rollout.test_episodes import TOOLS_TEMPLATE, experiment, sample, scripted

SERVERS = Path(__file__).parents[1] / "environments" / "nemo_gym_servers.py"
TOOL = {
    "type": "function", "name": "get_weather", "description": "", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
ROW = {
    "agent_ref": {"type": "responses_api_agents", "name": "agent"},
    "responses_create_params": {
        "input": [{"role": "developer", "content": "ab"}, {"role": "user", "content": "12?"}],
        "tools": [TOOL], "temperature": 0.1,
    }
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, python = free_port(), python_with("nemo_gym")
    folder = tmp_path_factory.mktemp("nemo_gym")
    with running([python, str(SERVERS), str(port)], folder, f"http://127.0.0.1:{port}/"):
        yield f"http://127.0.0.1:{port}"


def of_rows(tmp_path: Path, url: str, **env: Any) -> Experiment:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(ROW) + "\n") * 5)
    name = "nemorl.environments.nemo_gym:rows"
    arguments = {"path": str(path)}
    rows = GeneratorDataset(name="generator", function=name, arguments=arguments, answer_key=None)
    folder = save_tokenizer(tmp_path, TOOLS_TEMPLATE)
    config = {
        "data": DataConfig(train=rows),
        "env": NemoGymEnvConfig(name="nemo_gym", url=url, **env),
        "rewards": (),
    }
    return experiment(folder, "CallsTools", {}).model_copy(update=config)


def test_an_agent_of_nemo_gym_is_recorded_and_rewarded(url, tmp_path, tokenizer):
    call = '<tool_call>{"name":  "get_weather", "arguments":{"city":"ab"}}</tool_call>'
    engine = scripted(tokenizer, call, "cold")
    group, (trajectory,) = sample(of_rows(tmp_path, url), engine.generate)
    assert group.trajectories[0].error is None
    # Both turns are in one sequence, with the tokens as they were sampled.
    assert tokenizer.decode(trajectory.tokens[trajectory.loss_mask]) == f"{call}<|im_end|>cold<|im_end|>"
    text = tokenizer.decode(trajectory.tokens)
    assert text.startswith("<tool_call> get_weather<|im_start|>system\nab<|im_end|>\n<|im_start|>user\n12?")
    assert 'tool\n{"city":"ab","weather_description":"The weather in ab is cold."}<|im_end|>' in text
    # A call, its output and the message: the server's verification has seen all of them.
    assert group.trajectories[0].rewards == {"nemo_gym": pytest.approx(1 / 3)}


def test_the_head_server_says_where_the_agent_of_a_row_is(url, tmp_path, tokenizer):
    head = f"http://127.0.0.1:{int(url.rpartition(':')[2]) + 3}"
    group, _ = sample(of_rows(tmp_path, head, url_of="head"), scripted(tokenizer, "cold").generate)
    assert group.trajectories[0].error is None
    assert group.trajectories[0].rewards == {"nemo_gym": 0.0}  # without a call


def test_an_agent_that_fails_is_a_failed_environment(url, tmp_path, tokenizer):
    config = of_rows(tmp_path, url)
    env = config.env.model_copy(update={"url": f"{url}/nowhere", "max_retries": 0})
    group, _ = sample(config.model_copy(update={"env": env}), scripted(tokenizer).generate)
    assert "answered with status 404" in group.trajectories[0].error


def test_a_server_that_is_gone_is_lost():
    async def main():
        config = NemoGymEnvConfig(name="nemo_gym", url=f"http://127.0.0.1:{free_port()}")
        factory = NemoGymFactory(config)
        try:
            with pytest.raises(EnvironmentLost, match="does not answer"):
                await factory.post(f"{config.url}/run", {})
            with pytest.raises(ValueError, match="has no row of NeMo-Gym"):
                await factory.create().run(task(), None)
        finally:
            await factory.close()

    asyncio.run(main())
