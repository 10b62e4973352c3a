import asyncio
import json
import os
import socket
import sys

import pytest

from nemorl.config.environment import CodeEnvConfig
from nemorl.environments.code import AssertTest, CodeFactory, IOTest, last_block, read_tests
from nemorl.environments.sandbox import Execution, SandboxError, SandboxUnavailable
from nemorl.trajectories import Step
from tests.environments.episodes import answer, task
from tests.required import missing

DOUBLE = "Double it:\n```python\nprint(2 * int(input()))\n```\n"
IO = [{"input": "1", "output": "2\n"}, {"input": "2\n", "output": "4"}, {"input": "3", "output": "7"}]
SQUARE = "```python\ndef square(x):\n    return x * x\n```"
ASSERTS = ["assert square(2) == 4", "assert square(3) == 9"]


def block(code: str) -> str:
    return f"```python\n{code}\n```"


ANSWERS = [
    (DOUBLE, IO[:2], 1.0, 1.0),
    (DOUBLE, IO, 0.0, 2 / 3),
    (DOUBLE, {"inputs": ["1", "3"], "outputs": ["2", "7"]}, 0.0, 0.5),
    (SQUARE, ASSERTS, 1.0, 1.0),
    (SQUARE, json.dumps([*ASSERTS, "assert square(2) == 5"]), 0.0, 2 / 3),
    (SQUARE, "assert square(2) == 4\nassert square(3) == 8", 0.0, 0.0),
    ("print(2)", IO[:1], 0.0, 0.0),  # no block
    (block("print(2") + "\n", IO[:1], 0.0, 0.0),
    (block("print(2)\nraise SystemExit(1)"), IO[:1], 0.0, 0.0),
    # Answers that end before the test pass nothing.
    (block("import sys\nsys.exit(0)"), ASSERTS, 0.0, 0.0),
    (block("import os\nos._exit(0)"), ASSERTS, 0.0, 0.0),
    (block("def square(x):\n    raise SystemExit(0)"), ASSERTS, 0.0, 0.0),
    # Its own trial does not run, and reads nothing of the test.
    (
        block("def square(x):\n    return x * x\nif __name__ == '__main__':\n    print(input())"),
        ASSERTS,
        1.0,
        1.0,
    ),
    (block("open('/etc/shadow').read()\nprint(2)"), IO[:1], 0.0, 0.0),
    (block("while True: pass"), IO[:1], 0.0, 0.0),
]


@pytest.mark.parametrize("score", ["all", "share"])
def test_answers_are_judged_by_tests(score: str) -> None:
    sandbox = {"cpu_seconds": 1.0, "wall_seconds": 60, "max_concurrent": 4}
    config = CodeEnvConfig(name="code", score=score, weight=2.0, answer_seconds=600, sandbox=sandbox)

    async def main() -> list[float]:
        try:
            factory = CodeFactory(config)
        except SandboxUnavailable as error:
            missing("bubblewrap", str(error))
        assert factory.reward_weights == {"code": 2.0}
        assert await factory.answer_in(SQUARE) == "def square(x):\n    return x * x\n"
        try:
            given = [answer(factory, task(tests=tests), text) for text, tests, *_ in ANSWERS]
            steps = await asyncio.gather(*given)
        finally:
            await factory.close()
        assert all(step.done and step.num_retries == 0 for step in steps)
        return [step.rewards["code"] for step in steps]

    expected = [share if score == "share" else whole for _, _, whole, share in ANSWERS]
    assert asyncio.run(main()) == expected


# Each prints the right answer, 2, if it comes that far; `test_sandbox.py` has more of them.
ESCAPES = {
    "fork_bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "memory_bomb": "data = []\nwhile len(data) < 4096:\n    data.append(bytes(1 << 20))\nprint(2)",
    "output_flood": "for _ in range(100_000):\n    print('x' * 1000)\nprint(2)",
    "disk": "open('big', 'wb').write(bytes(100 << 20))\nprint(2)",
    "write": "open('/etc/escape', 'w')\nprint(2)",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', PORT))\nprint(2)",
    "signal": "import os, signal\nos.kill(PARENT, signal.SIGCONT)\nprint(2)",
    "symlink": "import os\nos.symlink('/etc/shadow', 'link')\nopen('link').read()\nprint(2)",
    "proc": "open('/proc/1/environ').read()\nprint(2)",
}


@pytest.mark.parametrize("escape", ESCAPES)
def test_an_escape_is_a_wrong_answer_like_any_other(escape: str) -> None:
    sandbox = {"cpu_seconds": 0.5, "wall_seconds": 60, "memory_mib": 128, "disk_mib": 8}
    config = CodeEnvConfig(name="code", answer_seconds=600, sandbox=sandbox)

    async def main(port: int) -> list[Step]:
        try:
            factory = CodeFactory(config)
        except SandboxUnavailable as error:
            missing("bubblewrap", str(error))
        program = ESCAPES[escape].replace("PORT", str(port)).replace("PARENT", str(os.getpid()))
        try:
            answers = (answer(factory, task(tests=IO[:1]), text) for text in (block(program), DOUBLE))
            return await asyncio.gather(*answers)
        finally:
            await factory.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        wrong, right = asyncio.run(main(listener.getsockname()[1]))
    assert (wrong.done, wrong.rewards, wrong.num_retries) == (True, {"code": 0.0}, 0)
    assert right.rewards == {"code": 1.0}


def test_the_last_closed_block_is_the_program() -> None:
    assert last_block("```\na\n```\ntext\n  ```py\nb\n\n  ```\n```python\nopen") == "b\n\n"
    assert last_block("``` a ```") is None


def test_forms_of_tests() -> None:
    assert read_tests(task(tests="assert f() == 1"), "tests") == (AssertTest("assert f() == 1"),)
    both = (AssertTest("assert f()"), IOTest("1", "2"))
    assert read_tests(task(t=["assert f()", {"input": "1", "output": "2"}]), "t") == both
    assert read_tests(task(t='{"inputs": ["1"], "outputs": ["2"]}'), "t") == both[1:]
    for wrong in (None, [], 3, {"inputs": ["1"], "outputs": []}, [{"input": 1, "output": "2"}]):
        with pytest.raises(ValueError, match="task 0"):
            read_tests(task(tests=wrong), "tests")


class Unreliable:
    """A sandbox of the user's that fails the first `failures` times."""

    def __init__(self, limits, failures=0, seconds=0.0) -> None:
        self.failures, self.seconds, self.calls = failures, seconds, 0

    async def run(self, program: str, stdin: str = "") -> Execution:
        self.calls += 1
        await asyncio.sleep(self.seconds)
        if self.failures:
            self.failures -= 1
            raise SandboxError("gone")
        return Execution("2\n", "", 0)

    async def close(self) -> None:
        pass


def unreliable(**options: float) -> CodeEnvConfig:
    sandbox = {"name": "custom", "factory": "my_sandbox:Unreliable", "options": options}
    seconds = options.get("seconds", 20.0)
    return CodeEnvConfig(name="code", score="share", answer_seconds=seconds, sandbox=sandbox)


def test_a_sandbox_that_fails_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_sandbox", sys.modules[__name__])
    once = CodeFactory(unreliable(failures=1))
    step = asyncio.run(answer(once, task(tests=IO[:1]), DOUBLE))
    assert (step.rewards, step.num_retries) == ({"code": 1.0}, 1)
    with pytest.raises(SandboxError, match="gone"):
        asyncio.run(answer(CodeFactory(unreliable(failures=2)), task(tests=IO[:1]), DOUBLE))


def test_tests_that_have_not_started_in_time_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_sandbox", sys.modules[__name__])
    step = asyncio.run(answer(CodeFactory(unreliable(seconds=0.05)), task(tests=IO[:1] * 4), DOUBLE))
    # The first test ends after the time for all of them.
    assert step.rewards == {"code": 0.25}
