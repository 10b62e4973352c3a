import asyncio
import json
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nemorl.config.environment import ToolsEnvConfig
from nemorl.environments.sandbox import SandboxUnavailable, find_isolation
from nemorl.environments.tools import FunctionTool, ToolsFactory
from nemorl.trajectories import Action, EnvironmentLost, Message, Reply, Step, StopReason, ToolCall
from tests.environments.episodes import said, task

HERE = "tests.environments.test_tools"


def multiply(a: int, b: int = 2) -> int:
    """Multiply two numbers.

    Args:
        a: One number.
        b: Another one.
    """
    return a * b


async def refuse(text: str) -> str:
    """Raise an error.

    Args:
        text: What it says.
    """
    raise LookupError(text)


def sleep() -> str:
    """Take long."""
    time.sleep(60)
    return "late"


def python(code: str) -> str:
    """Do nothing.

    Args:
        code: What not to run.
    """
    return code


def no_docstring(a: int) -> int:
    return a


def calls(*made: tuple[str, dict], errors: tuple[str, ...] = ()) -> Action:
    listed = tuple(ToolCall(f"call0000{n}", name, arguments) for n, (name, arguments) in enumerate(made))
    return Action("…", np.zeros(1, dtype=np.int32), StopReason.STOP, Reply("", None, listed, errors))


def converse(config: dict, *actions: Action, expected: str | None = "7") -> tuple[list[dict], list[Step]]:
    """The tools and the steps of one conversation."""

    async def run():
        factory = ToolsFactory(ToolsEnvConfig(name="tools", **config))
        environment = factory.create()
        try:
            await environment.reset(task(expected))
            return list(environment.tools), [await environment.step(action) for action in actions]
        finally:
            await environment.close()
            await factory.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def results(step: Step) -> list[str]:
    return [message.content for message in step.messages]


def test_a_function_is_described_by_its_signature_and_called():
    tools, (step,) = converse(
        {"tools": [f"{HERE}:multiply"]}, calls(("multiply", {"a": 3}), ("multiply", {"a": 3, "b": 5}))
    )
    assert tools == [{"type": "function", "function": {
        "name": "multiply", "description": "Multiply two numbers.", "parameters": {
            "type": "object", "required": ["a"], "properties": {
                "a": {"type": "integer", "description": "One number."},
                "b": {"type": "integer", "description": "Another one."}}}}}]  # fmt: skip
    first, second = step.messages
    assert (first, second.content) == (
        Message("tool", "6", tool_call_id="call00000", name="multiply"), "15",
    )  # fmt: skip
    assert not step.done


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("multiply", {"a": "x"}), "Error: a: Input should be a valid integer"),
        (("multiply", {"a": 1, "c": 1}), "Error: c: Unexpected keyword argument"),
        (("divide", {}), "Error: there is no tool `divide`; the tools are multiply, refuse, sleep"),
        (("refuse", {"text": "not here"}), "Error: LookupError: not here"),
        (("refuse", {"text": "x" * 100}), "Error: LookupError: xxxxxxxx… (92 more characters)"),
        (("sleep", {}), "Error: no result within 0.2 s"),
    ],
)
def test_what_is_wrong_with_a_call_is_its_result(call, says):
    config = {"tools": [f"{HERE}:{name}" for name in ("multiply", "refuse", "sleep")], "call_seconds": 0.2}
    limit = 28 if "more characters" in says else 1000
    _, (step,) = converse(config | {"max_result_characters": limit}, calls(call))
    assert results(step)[0].startswith(says)


def test_calls_that_cannot_be_read_are_shown_to_the_policy():
    config = {"tools": [f"{HERE}:multiply"]}
    wrong = "Tool call 1 cannot be read."
    _, (alone, beside) = converse(
        config, calls(errors=(wrong,)), calls(("multiply", {"a": 1}), errors=(wrong,))
    )
    assert alone.messages == (Message("user", wrong),)
    assert results(beside) == [f"2\n\n{wrong}"]


@pytest.mark.parametrize(
    ("text", "tag", "reward"),
    [("7.0", None, 1.0), ("8", None, 0.0), ("so <answer>7</answer>", "answer", 1.0), ("7", "answer", 0.0)],
)
def test_the_last_turn_is_compared_with_the_answer(text, tag, reward):
    config = {"tools": [f"{HERE}:multiply"], "answer": "equal", "answer_tag": tag}
    _, steps = converse(config, calls(("multiply", {"a": 1})), said(text))
    assert steps[0].rewards == {}
    assert (steps[1].rewards, steps[1].done) == ({"tools": reward}, True)


def test_a_call_in_the_last_turn_is_no_answer():
    config = {"tools": [f"{HERE}:multiply"], "answer": "equal", "max_turns": 1}
    _, (step,) = converse(config, calls(("multiply", {"a": 1})))
    assert (step.rewards, step.done) == ({"tools": 0.0}, True)


def test_documents_are_found_by_their_words(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    texts = ["Cats purr at night.", "Dogs bark.", "A cat and a dog: cats, cats!"]
    corpus.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    config = {"retrieval": {"path": corpus, "text_key": "body", "num_results": 2}}
    tools, (step,) = converse(config, calls(("search", {"query": "cats"}), ("search", {"query": "zebras"})))
    assert tools[0]["function"]["parameters"]["required"] == ["query"]
    found, nothing = results(step)
    assert {line[4:] for line in found.split("\n\n")} == {texts[0], texts[2]}
    assert nothing == "no document has these words"


def test_python_keeps_its_variables_in_a_sandbox():
    config = {"python": {}}
    try:
        find_isolation(ToolsEnvConfig(name="tools", **config).python)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    _, steps = converse(
        config,
        calls(("python", {"code": "x = 6"})),
        calls(("python", {"code": "x * 7"}), ("python", {"code": "y"})),
    )
    assert results(steps[0]) == ["(no output)"]
    value, failure = results(steps[1])
    assert value.strip() == "42"
    assert "NameError" in failure


MCP = {"mcp": [{"command": [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]}]}


def test_tools_of_an_mcp_server():
    tools, (step,) = converse(MCP, calls(("add", {"a": 3, "b": 4}), ("add", {"a": "x"})))
    assert [tool["function"]["name"] for tool in tools] == ["add", "leave"]
    assert tools[0]["function"]["description"] == "Add two numbers."
    assert set(tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
    right, wrong = results(step)
    assert right == "7"
    assert wrong.startswith("Error: ")


def test_an_mcp_server_that_is_gone_is_lost_and_started_again():
    async def run():
        factory = ToolsFactory(ToolsEnvConfig(name="tools", **MCP))
        try:
            environment = factory.create()
            await environment.reset(task())
            with pytest.raises(EnvironmentLost, match=r"the MCP server .* is gone"):
                await environment.step(calls(("leave", {})))
            again = factory.create()
            await again.reset(task())
            return await again.step(calls(("add", {"a": 1, "b": 1})))
        finally:
            await factory.close()

    assert results(asyncio.run(asyncio.wait_for(run(), 120))) == ["2"]


def test_an_mcp_server_that_does_not_start_is_named():
    with pytest.raises(EnvironmentLost, match=r"the MCP server /no/such does not answer"):
        converse({"mcp": [{"command": ["/no/such"]}]})


@contextmanager
def mcp_over_http(port: int):
    """A server that answers on the port."""
    program = str(Path(__file__).with_name("mcp_server.py"))
    process = subprocess.Popen([sys.executable, program, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def test_an_mcp_server_over_http_that_is_gone_is_lost_and_reached_again():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def add(factory, *, a, b):
        environment = factory.create()
        await environment.reset(task())
        return results(await environment.step(calls(("add", {"a": a, "b": b}), ("add", {"a": "x"}))))

    async def run():
        mcp = [{"url": f"http://127.0.0.1:{port}/mcp"}]
        factory = ToolsFactory(ToolsEnvConfig(name="tools", mcp=mcp, call_seconds=20))
        try:
            with pytest.raises(
                EnvironmentLost, match=rf"the MCP server http://127.0.0.1:{port}/mcp does not"
            ):
                await add(factory, a=1, b=1)
            with mcp_over_http(port) as server:
                right, wrong = await add(factory, a=3, b=4)
                environment = factory.create()
                await environment.reset(task())
                server.kill()
                server.wait()
                with pytest.raises(EnvironmentLost, match=r"the MCP server .* is gone"):
                    await environment.step(calls(("add", {"a": 1, "b": 1})))
            with mcp_over_http(port):
                again, _ = await add(factory, a=5, b=6)
        finally:
            await factory.close()
        return right, wrong, again

    right, wrong, again = asyncio.run(asyncio.wait_for(run(), 150))
    assert (right, again) == ("7", "11")
    assert wrong.startswith("Error: ")


class Thing:
    """Of no type that JSON has."""


def take(thing: Thing) -> str:
    """Take a thing.

    Args:
        thing: The thing.
    """
    return str(thing)


def test_a_tool_whose_parameter_json_cannot_express_is_refused():
    with pytest.raises(
        ValueError, match=r"Unable to generate .* schema for .*Thing.*; give parameters types of JSON"
    ):
        FunctionTool(take, 1.0)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools have the name `multiply`"):
        converse({"tools": [f"{HERE}:multiply"] * 2})
