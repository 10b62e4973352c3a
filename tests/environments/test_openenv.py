"""The environment `openenv` against real servers of the package `openenv`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nemorl.config.server_environments import OpenEnvConfig
from nemorl.environments.openenv import OpenEnvFactory
from nemorl.plan.addresses import server_problems
from nemorl.trajectories import Action, EnvironmentLost, Message, Reply, Step, StopReason, ToolCall
from tests.environments.episodes import said, task
from tests.environments.servers import end, free_port, python_with, running

SERVER = Path(__file__).with_name("openenv_server.py")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of the server whose actions are typed; the next one is that of the server with MCP tools."""
    port = free_port()
    command = [python_with("openenv"), str(SERVER), str(port)]
    with running(command, tmp_path_factory.mktemp("openenv"), f"http://127.0.0.1:{port}/health"):
        yield port


def calls(name: str, **arguments) -> Action:
    made = (ToolCall("call00000", name, arguments),)
    return Action("…", np.zeros(1, dtype=np.int32), StopReason.STOP, Reply("", None, made))


def converse(port: int, *actions: Action, columns: dict | None = None, **config):
    """Opening, tools and steps of one conversation."""

    async def main():
        settings = OpenEnvConfig(name="openenv", url=f"http://127.0.0.1:{port}", **config)
        factory = OpenEnvFactory(settings)
        environment = factory.create()
        try:
            opening = await environment.reset(task(prompt="Play. ", **(columns or {})))
            return opening, list(environment.tools), [await environment.step(action) for action in actions]
        finally:
            await environment.close()
            await factory.close()

    return asyncio.run(asyncio.wait_for(main(), 120))


def test_text_fills_a_field_of_an_action(port):
    opening, tools, steps = converse(
        port, said("I take <move>4</move>"), said("<move>all</move>"), said("four"), said("<move>9</move>"),
        columns={"seed": 3}, action_field="count", action_tag="move", observation_field="left",
    )  # fmt: skip
    assert (opening, tools) == ((Message("user", "Play. 13"),), [])
    assert steps[0] == Step((Message("user", "9"),), {"openenv": 1.0}, done=False)
    assert steps[1].messages[0].content.startswith("Error: count: Input should be a valid integer")
    assert steps[2].messages[0].content == "Error: there is no action in <move>…</move>"
    assert (steps[3].rewards, steps[3].done) == ({"openenv": 1.0}, True)


def test_actions_are_calls_of_a_tool_with_their_fields(port):
    opening, tools, (wrong, last) = converse(
        port, calls("act", number=1), calls("act", count=6), reset={"coins": 20}, max_turns=2
    )
    assert opening[0].content == 'Play. {"left": 20, "note": ""}'
    assert tools == [{"type": "function", "function": {
        "name": "act", "description": "Take some of the coins; who takes the last one has won.",
        "parameters": {"type": "object", "required": ["count"], "properties": {
            "count": {"title": "Count", "type": "integer"}}}}}]  # fmt: skip
    assert "Error: count: Field required; number: Extra inputs are not permitted" in wrong.messages[0].content
    assert (last.rewards, last.done) == ({"openenv": 1.5}, True)  # max_turns


def test_a_server_with_mcp_tools_offers_these(port):
    _, tools, (first, wrong, last) = converse(
        port + 1, calls("add", number=3), calls("add", number="x"), calls("add", number=2)
    )
    assert [tool["function"]["name"] for tool in tools] == ["add"]
    assert tools[0]["function"]["parameters"]["required"] == ["number"]
    assert (first.messages[0].content, first.rewards, first.done) == ("total 3", {"openenv": 3.0}, False)
    assert wrong.messages[0].content.startswith("Error: 1 validation error")
    assert (last.rewards, last.done) == ({"openenv": 5.0}, True)


def test_conversations_have_sessions_of_their_own_as_far_as_the_server_has_them(port):
    config = {"action_field": "count", "observation_field": "left"}

    async def main():
        settings = OpenEnvConfig(name="openenv", url=f"http://127.0.0.1:{port}/", **config)
        factory = OpenEnvFactory(settings)
        first, second, third = (factory.create() for _ in range(3))
        try:
            await asyncio.gather(first.reset(task()), second.reset(task()))
            steps = [
                await one.step(said(count)) for one, count in ((first, "1"), (second, "2"), (first, "1"))
            ]
            with pytest.raises(EnvironmentLost, match="has no session"):
                await third.reset(task())
            with pytest.raises(RuntimeError, match=r"answers to step: unlucky \(EXECUTION_ERROR\)"):
                await second.step(said("13"))
        finally:
            for one in (first, second, third):
                await one.close()
            await factory.close()
        return [step.messages[0].content for step in steps]

    assert asyncio.run(asyncio.wait_for(main(), 120)) == ["9", "8", "8"]


def test_check_names_a_server_that_does_not_answer(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    url = f"http://127.0.0.1:{free_port()}"
    experiment = SimpleNamespace(
        generation=None, rewards=(), env=OpenEnvConfig(name="openenv", url=url, action_field="count")
    )
    [problem] = server_problems(experiment)
    assert (problem.field, problem.value) == ("env.url", url)
    assert problem.fix == "this machine cannot connect to it (Connection refused); start the server"
    [problem] = OpenEnvConfig(name="openenv", url="127.0.0.1:8000").problems({})
    assert problem.field == "url"


def test_a_server_that_is_gone_is_lost(tmp_path):
    port = free_port()
    settings = OpenEnvConfig(name="openenv", url=f"http://127.0.0.1:{port}", action_field="count")

    async def main():
        factory = OpenEnvFactory(settings)
        try:
            with pytest.raises(EnvironmentLost, match="does not answer"):
                await factory.create().reset(task())
            command = [python_with("openenv"), str(SERVER), str(port)]
            with running(command, tmp_path, f"http://127.0.0.1:{port}/health") as process:
                environment = factory.create()
                await environment.reset(task())
                end(process)
                with pytest.raises(EnvironmentLost, match=r"ended the session|is gone"):
                    await environment.step(said("1"))
                await environment.close()
        finally:
            await factory.close()

    asyncio.run(asyncio.wait_for(main(), 300))
