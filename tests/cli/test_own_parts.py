"""Functions of one's own are tried before a run, and what `env` requires of the machine and the model."""

import json
import sys
from pathlib import Path

import pytest

from nemorl.config.sandbox import LocalSandboxConfig
from nemorl.environments.sandbox import SandboxUnavailable, find_isolation
from nemorl.models.create import CHAT, CHAT_TEMPLATE, create_tiny_model
from tests.cli.conftest import Nemorl
from tests.config.experiments import GRPO, write

PARTS = '''
from nemorl.algorithms.custom import advantage
from nemorl.algorithms.objective import TokenLoss


@advantage
def centred(groups, scale=1.0):
    """Less the mean of the group."""
    found = []
    for group in groups:
        rewards = [t.reward for t in group.trajectories]
        found.append([scale * (r - sum(rewards) / len(rewards)) for r in rewards])
    return found


def ending(groups):
    """The end of the process."""
    raise SystemExit(3)


def forgetful(groups):
    """Nothing at all."""
    return []


async def later(groups):
    """What nobody waits for."""
    return []


def measured(batch, logprobs, old, advantages, metric):
    """REINFORCE, and a metric."""
    return TokenLoss(-logprobs * advantages, metrics={metric: -logprobs})
'''


ADD = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: Another.
    """
    return a + b
'''
MCP_SERVER = Path(__file__).parents[1] / "environments" / "mcp_server.py"


@pytest.mark.parametrize(
    ("section", "refused"),
    [
        ("advantage={name: custom, function: 'my_parts:centred', arguments: {scale: 2}}", None),
        ("advantage={name: custom, function: 'my_parts:forgetful'}", "returned 0 values for 2 groups"),
        ("advantage={name: custom, function: 'my_parts:ending'}", "it raised SystemExit: 3"),
        ("advantage={name: custom, function: 'my_parts:later'}", "it is an async function"),
        ("advantage={name: custom, function: 'my_parts:gone'}", "my_parts has no gone; correct the name"),
        ("advantage={name: custom, function: 'my_parts:centred', arguments: {rate: 1}}", "argument 'rate'"),
        ("loss={name: custom, function: 'my_parts:measured', arguments: {metric: own/gain}}", None),
        (
            "loss={name: custom, function: 'my_parts:measured', arguments: {metric: loss/total}}",
            "its metric loss/total has the name of a metric of the run",
        ),
        (
            "loss={name: custom, function: 'my_parts:measured', arguments: {metric: tokens}}",
            "its metric tokens has the name of a metric of the run",
        ),
        ("loss={name: custom, function: 'my_parts:gone'}", "my_parts has no gone; correct the name"),
    ],
)
def test_check_tries_them(nemorl: Nemorl, experiment: Path, section: str, refused: str | None) -> None:
    Path("my_parts.py").write_text(PARTS, encoding="utf-8")

    outcome = nemorl("check", experiment, f"algorithm.{section}")

    if refused is None:
        assert (outcome.status, outcome.err) == (0, outcome.err)
        return
    assert outcome.status == 2
    assert f"algorithm.{section.partition('=')[0]}.function = my_parts:" in outcome.err
    assert refused in outcome.err


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ((), None),
        (("env.tests_key=cases",), "env.tests_key = cases"),
        (("env.answer_seconds=55",), "the tests of an answer may take 65 s"),
        (("env.sandbox={python: /nowhere/python}",), "/nowhere/python: does not start"),
        (("env.sandbox={name: custom, factory: 'my_sandbox:Sandbox'}",), "cannot import my_sandbox"),
    ],
)
def test_check_tries_the_sandbox(
    nemorl: Nemorl, experiment: Path, overrides: tuple[str, ...], refused: str | None
) -> None:
    columns = {"tests": ["assert f()"]}
    lines = [json.dumps({"prompt": f"{number}+1=", **columns}) + "\n" for number in range(8)]
    Path("tasks.jsonl").write_text("".join(lines), encoding="utf-8")
    tasks = "data.train={name: jsonl, path: tasks.jsonl, answer_key: null}"

    outcome = nemorl("check", "--here", experiment, "rewards=[]", "env={name: code}", tasks, *overrides)

    if refused is None and isolates():
        assert (outcome.status, outcome.err) == (0, outcome.err)
        return
    assert outcome.status == 2
    assert (refused or "this machine cannot isolate programs") in outcome.err


@pytest.mark.parametrize(
    ("template", "python", "refused"),
    [
        (CHAT_TEMPLATE, "{}", None),
        (CHAT_TEMPLATE, "{python: /nowhere/python}", "env.python.name = auto"),
        ("{{ messages[-1].content }}", "{}", "model shows no known format of tool calls"),
        ("<tool_call>{{ messages[-1].content }}", "{}", "model does not show tools to the model"),
    ],
)
def test_check_tries_what_tools_require(
    nemorl: Nemorl, tmp_path: Path, template: str, python: str, refused: str | None
) -> None:
    create_tiny_model(tmp_path / "model", CHAT)
    Path("template.jinja").write_text(template, encoding="utf-8")
    experiment = write(tmp_path, GRPO.replace("models/arithmetic", str(tmp_path / "model")))
    fields = ["data.chat=true", "rewards=[]", "policy.tokenizer.chat_template=template.jinja"]

    env = f"env={{name: tools, python: {python}, answer: equal}}"
    outcome = nemorl("check", "--here", experiment, *fields, env)

    if refused is None and isolates():
        assert (outcome.status, outcome.err) == (0, outcome.err)
        return
    assert outcome.status == 2
    assert (refused or "this machine cannot isolate programs") in outcome.err


@pytest.mark.parametrize(
    ("tools", "server", "here", "refused"),
    [
        ("[]", "", "--here", None),
        ("['my_tools:add']", "", "", "the tool of tools.0 is named `add`, too; rename or remove one of them"),
        ("[]", "-c gone", "", "{}: will be verified on the target machine (the MCP server {} does not"),
        ("[]", "-c gone", "--here", "does not answer: Connection closed (NameError: name 'gone' is not"),
    ],
)
def test_check_asks_mcp_servers_for_their_tools(
    nemorl: Nemorl, tmp_path: Path, tools: str, server: str, here: str, refused: str | None
) -> None:
    create_tiny_model(tmp_path / "model", CHAT)
    experiment = write(tmp_path, GRPO.replace("models/arithmetic", str(tmp_path / "model")))
    Path("my_tools.py").write_text(ADD, encoding="utf-8")
    Path("server.py").symlink_to(MCP_SERVER)  # an error shortens a value that is as long as a path may be
    command = [sys.executable, *(server or "server.py").split()]
    env = f"env={{name: tools, tools: {tools}, mcp: [{{command: {json.dumps(command)}}}], answer: equal}}"

    outcome = nemorl("check", *here.split(), experiment, "data.chat=true", "rewards=[]", env)

    if refused is None:
        assert (outcome.status, outcome.err) == (0, outcome.err)
        return
    assert outcome.status == (0 if "verified" in refused else 2)
    said = " ".join((outcome.out + outcome.err).split())
    assert f"env.mcp.0.command = {' '.join(command)}" in said
    assert refused.replace("{}", " ".join(command)) in said


def isolates() -> bool:
    try:
        find_isolation(LocalSandboxConfig())
    except SandboxUnavailable:
        return False
    return True


def test_check_names_task_folders_that_cannot_be_run(nemorl: Nemorl, tmp_path: Path) -> None:
    create_tiny_model(tmp_path / "model", CHAT)
    experiment = write(tmp_path, GRPO.replace("models/arithmetic", str(tmp_path / "model")))
    for name, image in (("a", "ubuntu:24.04"), ("b", "org/b:1"), ("c", "org/c:1")):
        for file, text in (
            ("instruction.md", "Do it."),
            ("tests/test.sh", ""),
            ("environment/Dockerfile", f"FROM {image}"),
        ):
            path = Path("tasks", name, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    tasks = "data={chat: true, train: {name: tasks, path: tasks, answer_key: null}}"

    outcome = nemorl("check", experiment, "rewards=[]", "env={name: terminal}", tasks)

    assert outcome.status == 2
    folder = Path("tasks/b").absolute()
    assert f"2 tasks of data.train cannot be run: {folder} requires the image org/b:1;" in outcome.err


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("raise SystemExit('no tool')", 0, "its episode with scripted answers raised ProgramFailed: "),
        ("pass", 2, "run: ValueError: it ended without a call of the model; correct the program"),
    ],
)
def test_check_tries_programs(nemorl: Nemorl, experiment: Path, source: str, status: int, said: str) -> None:
    command = [sys.executable, "-c", source, ":key:"]
    outcome = nemorl(
        "check", experiment, "rewards=[]", f"env={{name: program, command: {json.dumps(command)}}}"
    )
    assert outcome.status == status, outcome.err
    words = " ".join((outcome.out + outcome.err).split())
    assert ":key:" in words  # which rich would replace by a picture
    assert f"env.command = {' '.join(command)}" in words
    assert said in words
    assert "WARNING" not in words
