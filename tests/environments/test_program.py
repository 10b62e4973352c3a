"""Programs as agents: what they get, what their output gives, and what is left of them."""

import asyncio
import json
import os
import signal
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.environment import ProgramEnvConfig
from nemorl.environments.program import ProgramEnvironment, ProgramFailed, read_episode
from nemorl.trajectories import Episode, Message, Task

TASK = Task(3, (Message("user", "3+4="),), "7", {"level": 2})


class Address:
    """A model of which only the address is used."""

    name, base_url, api_key = "policy", "http://127.0.0.1:9/e/v1", "key-of-this-test"


def run(source: str, task: Task = TASK, **fields: Any) -> Episode:
    """An episode of a Python program."""
    command = (sys.executable, "-c", textwrap.dedent(source))
    config = ProgramEnvConfig(name="program", command=command, **fields)

    async def main() -> Episode:
        environment = ProgramEnvironment(config)
        try:
            return await environment.run(task, Address())  # type: ignore[arg-type]
        finally:
            await environment.close()

    return asyncio.run(main())


def test_a_program_gets_the_task_and_the_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("WANTED", "w")
    said = tmp_path / "said.json"
    source = f"""
        import json, os, sys
        names = "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "SECRET", "WANTED"
        json.dump([json.load(sys.stdin), *map(os.environ.get, names)], open({str(said)!r}, "w"))
        print('{{"rewards": {{"solved": 1, "short": 0.5}}}}')
        print("done")
    """
    episode = run(source, pass_environment=("WANTED",))
    assert episode.rewards == {"solved": 1.0, "short": 0.5}
    task, *variables = json.loads(said.read_text())
    assert task == {
        "index": 3, "messages": [{"role": "user", "content": "3+4="}], "answer": "7", "columns": {"level": 2}
    }  # fmt: skip
    assert variables == ["http://127.0.0.1:9/e/v1", "key-of-this-test", "policy", None, "w"]


def test_a_failed_program_is_an_error_with_the_end_of_its_stderr() -> None:
    with pytest.raises(ProgramFailed, match=r"ended with status 3: no tool"):
        run("import sys; print('no tool', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ProgramFailed, match="ended with status -11"):
        run("import os; os.kill(os.getpid(), 11)")


def test_a_program_that_reads_nothing_and_one_that_says_much_end() -> None:
    assert run("pass") == Episode()
    assert run("print('x' * 3_000_000); print('{\"rewards\": {}}')") == Episode()


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize("hangs", [False, True])
def test_all_processes_of_a_program_end_with_it(tmp_path: Path, hangs: bool) -> None:
    """Also one in a session of its own that holds the output."""
    source = f"""
        import os, subprocess, sys, time
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        pids = [subprocess.Popen(sleeper, start_new_session=own).pid for own in (False, True)]
        open({str(tmp_path / "part")!r}, "w").write(f"{{os.getpid()}} {{pids[0]}} {{pids[1]}}")
        os.rename({str(tmp_path / "part")!r}, {str(tmp_path / "pids")!r})
        time.sleep(600 * {hangs})
    """
    if hangs:

        async def main() -> None:
            command = (sys.executable, "-c", textwrap.dedent(source))
            environment = ProgramEnvironment(ProgramEnvConfig(name="program", command=command))
            running = asyncio.ensure_future(environment.run(TASK, Address()))  # type: ignore[arg-type]
            while not (tmp_path / "pids").exists():
                assert not running.done()
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

        asyncio.run(main())
    else:
        run(source)
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    assert not any(map(is_running, pids))
    assert is_running(os.getpid())


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize(("own", "characters"), [("env={}", 1), ("", 10**6)])
def test_the_end_of_a_program_ends_its_episode(
    tmp_path: Path, status: int, own: str, characters: int
) -> None:
    """Also where a process that cannot be found holds its output, or one its input with an unread task."""
    source = f"""
        import subprocess, sys
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        pid = subprocess.Popen(sleeper, start_new_session=True, {own}).pid
        open({str(tmp_path / "pid")!r}, "w").write(str(pid))
        print('{{"rewards": {{"solved": 1}}}}')
        print("no tool", file=sys.stderr)
        sys.exit({status})
    """
    task = Task(3, (Message("user", "x" * characters),))
    began = time.monotonic()
    try:
        if status:
            with pytest.raises(ProgramFailed, match=r"ended with status 3: no tool"):
                run(source, task)
        else:
            assert run(source, task).rewards == {"solved": 1.0}
    finally:
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert time.monotonic() - began < 30  # of 600


def test_the_time_limit_ends_a_program() -> None:
    with pytest.raises(TimeoutError, match=r"the program has not ended within 0.3 s"):
        run("import time; time.sleep(600)", time_limit_seconds=0.3)


@pytest.mark.parametrize(
    ("output", "rewards"),
    [
        ("", {}),
        ("hello\n{not json}\n[1]", {}),
        ('{"rewards": {"a": 1}}\n{"rewards": {"a": 2}}\nbye', {"a": 2.0}),
        ('{"rewards": {"a": 1}}\n{"note": 3}', {}),
    ],
)
def test_the_last_object_of_the_output_has_the_rewards(output: str, rewards: dict[str, float]) -> None:
    assert read_episode(output).rewards == rewards


@pytest.mark.parametrize("rewards", ['{"a": "1"}', "[1]", '{"a": NaN}', '{"a": true}'])
def test_other_rewards_are_refused(rewards: str) -> None:
    with pytest.raises(ValueError, match="the rewards on stdout are"):
        read_episode(f'{{"rewards": {rewards}}}')


def test_a_program_that_is_not_there_is_refused() -> None:
    config = ProgramEnvConfig(name="program", command=("no-such-agent",))
    (problem,) = config.problems({})
    assert (problem.field, problem.value) == ("command.0", "no-such-agent")
