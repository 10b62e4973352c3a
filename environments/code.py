"""Python programs of the policy, judged by the tests of their task in a sandbox (docs/sandbox.md)."""

import json
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nemorl.config.environment import CodeEnvConfig
from nemorl.trajectories import Action, Environment, EnvironmentFactory, Message, Step, Task

from .sandbox import Sandbox, SandboxError, make_sandbox

REWARD = "code"
_FENCED = re.compile(r"^[ \t]*```[^`\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
FORMS = 'texts of assert statements, {"input": …, "output": …}, or {"inputs": […], "outputs": […]}'

# The answer runs as a module, so that `if __name__ == "__main__"` reads no input. Only after the test ran
# without an exception is the mark written: an answer that exits passes nothing.
_HARNESS = """
def judge():
    import json, os, sys
    answer, test, mark = json.load(sys.stdin)
    space = {"__name__": "answer"}
    exec(compile(answer, "answer.py", "exec"), space)
    exec(compile(test, "test.py", "exec"), space)
    sys.stdout.flush()
    os.write(1, mark.encode())
judge()
"""


@dataclass(frozen=True)
class IOTest:
    """A program passes that writes `output` when it reads `input`; space at the ends of lines is ignored."""

    input: str
    output: str

    async def run(self, sandbox: Sandbox, program: str) -> bool:
        execution = await sandbox.run(program, self.input)
        return execution.exit_code == 0 and _lines(execution.stdout) == _lines(self.output)


@dataclass(frozen=True)
class AssertTest:
    """An answer passes if this code raises nothing, executed in the module of the answer."""

    code: str

    async def run(self, sandbox: Sandbox, program: str) -> bool:
        mark = secrets.token_hex(16)
        execution = await sandbox.run(_HARNESS, json.dumps([program, self.code, mark]))
        return execution.exit_code == 0 and execution.stdout.endswith(mark)


Test = IOTest | AssertTest


class CodeEnvironment(Environment):
    """One answer, whose last fenced block is the program; the reward `code` is 0 to 1."""

    def __init__(self, config: CodeEnvConfig, sandbox: Sandbox) -> None:
        self._config, self._sandbox = config, sandbox
        self._tests: tuple[Test, ...] = ()

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The task's own opening. Raises ValueError for a task without tests."""
        self._tests = read_tests(task, self._config.tests_key)
        return task.messages

    async def step(self, action: Action) -> Step:
        """Raises SandboxError if the sandbox fails twice for a test."""
        program = last_block(action.text)
        num_passed, num_retries = 0, 0
        deadline = time.monotonic() + self._config.answer_seconds
        for test in self._tests:
            if program is None or time.monotonic() > deadline:
                break
            try:
                passes = await test.run(self._sandbox, program)
            except SandboxError:
                num_retries += 1
                passes = await test.run(self._sandbox, program)
            num_passed += passes
            if not passes and self._config.score == "all":
                break
        share = num_passed / len(self._tests)
        reward = share if self._config.score == "share" else float(share == 1)
        return Step(rewards={REWARD: reward}, num_retries=num_retries)


class CodeFactory(EnvironmentFactory):
    def __init__(self, config: CodeEnvConfig) -> None:
        """Raises SandboxUnavailable where no program can be isolated."""
        self.reward_weights, self._config = config.reward_weights, config
        self._sandbox = make_sandbox(config.sandbox)

    def create(self) -> CodeEnvironment:
        return CodeEnvironment(self._config, self._sandbox)

    async def answer_in(self, text: str) -> str | None:
        return last_block(text)

    async def close(self) -> None:
        await self._sandbox.close()


def last_block(text: str) -> str | None:
    """The last closed block between lines of three backticks; None without one."""
    found = _FENCED.findall(text)
    return found[-1] if found else None


def read_tests(task: Task, key: str) -> tuple[Test, ...]:
    """The tests of a task: a list of `FORMS`, one of them, or JSON of these. Raises ValueError."""
    value = task.columns.get(key)
    if isinstance(value, str):
        with suppress(ValueError):  # it is code
            value = json.loads(value)
    tests = tuple(_tests_in(value, f"task {task.index}: {key}"))
    if not tests:
        raise ValueError(f"task {task.index} has no tests in its column {key!r}: write {FORMS}")
    return tests


def _tests_in(value: Any, where: str) -> Iterator[Test]:
    match value:
        case None:
            return
        case str():
            yield AssertTest(value)
        case {"input": str(given), "output": str(expected)}:
            yield IOTest(given, expected)
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs):
            for given, expected in zip(inputs, outputs, strict=True):
                yield from _tests_in({"input": given, "output": expected}, where)
        case list():
            for item in value:
                yield from _tests_in(item, where)
        case _:
            raise ValueError(f"{where} has a test that is none of {FORMS}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
