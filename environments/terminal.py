"""Tasks in a shell: the policy works with the tool `bash` in a sandbox, then the tests of its task run there.

    user     the instruction of a task folder      (environments/task_folder.py)
    policy   calls of bash
    tool     output and exit status of each
    policy   a turn without a call, or the last one: the tests run and give the reward

Commands and tests run through the interpreter of a sandbox session, so every sandbox with sessions will do.
"""

import asyncio
import base64
import io
import json
import math
import tarfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemorl.config.sandbox import CustomSandboxConfig
from nemorl.config.terminal_environment import TerminalEnvConfig
from nemorl.trajectories import Action, Environment, EnvironmentFactory, Message, Step, Task

from .sandbox import SandboxError, SandboxSession, make_sandbox
from .task_folder import Copy, Run, TaskFolder, folder_of
from .tools import FunctionTool, ToolFailed, answer_calls

REWARD = "terminal"
_REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")  # in the order of Harbor

# Runs in the sandbox. Output goes to a file, since processes in the background would keep a pipe open.
_INSIDE = """
import base64, io, json, os, shutil, signal, subprocess, tarfile, tempfile

def unpack(archive):
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as files:
        files.extractall("/", filter="tar")

def shell(command, folder, variables, seconds, characters):
    os.makedirs(folder, exist_ok=True)
    variables = {**os.environ, "PWD": folder, **variables}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=variables, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        size, part = output.seek(0, os.SEEK_END), characters // 2
        output.seek(0)
        first = output.read(part if size > 2 * part else size)
        output.seek(max(size - part, len(first)))
        last = output.read()
    cut = f"\\n… ({size - 2 * part} bytes left out) …\\n" if size > 2 * part else ""
    return status, first.decode(errors="replace") + cut + last.decode(errors="replace")

def test(archive, command, folder, variables, seconds, files):
    shutil.rmtree("/tests", ignore_errors=True)
    for name in files:
        os.makedirs(os.path.dirname(name), exist_ok=True)
        if os.path.lexists(name):
            os.remove(name)
    unpack(archive)
    status, _ = shell(command, folder, variables, seconds, 0)
    texts = []
    for name in files:
        if os.path.isfile(name):
            with open(name, errors="replace") as file:
                texts.append(file.read(65536))
        else:
            texts.append(None)
    return status, texts
"""


class TerminalLost(Exception):
    """The sandbox has ended, with everything that the policy did, or does not do what it should."""


class TerminalEnvironment(Environment):
    def __init__(self, config: TerminalEnvConfig, make_session: Any) -> None:
        self._config, self._make_session = config, make_session
        self._session: SandboxSession | None = None
        self._folder: TaskFolder | None = None
        self._turns_left, self._turn_ends, self._lost = config.max_turns, 0.0, False
        self._waiting = asyncio.Lock()  # calls of a turn run in sequence
        self._bash = FunctionTool(self._tool(), None)
        self.tools = [self._bash.schema]

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The task's own opening. Raises ValueError for a folder that cannot be run, and SandboxError."""
        self._folder = folder = folder_of(task, self._config)
        self._session = self._make_session(folder.path)
        started = await self._session.run(_INSIDE)
        if started.exit_code != 0:
            raise SandboxError(f"the terminal does not start: {started.stderr or started.ended_by}")
        if not isinstance(self._config.sandbox, CustomSandboxConfig):
            await self._build(folder)
        return task.messages

    async def _build(self, folder: TaskFolder) -> None:
        """What the Dockerfile says. Raises ValueError where it fails."""
        end = time.monotonic() + self._config.command_seconds
        for one in folder.build:
            try:
                if isinstance(one, Copy):
                    await self._call("unpack", pack(one))
                    continue
                seconds = max(0.1, end - time.monotonic())
                status, output = await self._call("shell", *asdict(one).values(), seconds, 1000)
            except TerminalLost as error:
                raise ValueError(f"{folder.path}: its Dockerfile cannot be followed: {error}") from error
            if status != 0:
                command = one.command if isinstance(one, Run) else ""
                raise ValueError(f"{folder.path}: `{command}` of its Dockerfile failed: {output}")

    async def step(self, action: Action) -> Step:
        """Raises SandboxError."""
        self._turns_left -= 1
        if action.tool_calls or action.call_errors:
            self._turn_ends = time.monotonic() + self._config.command_seconds
            answers = await answer_calls(action, {"bash": self._bash}, self._config.max_result_characters)
            if self._lost:  # nothing is left to test
                return Step(rewards={REWARD: 0.0})
            if self._turns_left:
                return Step(answers, done=False)
        return Step(rewards={REWARD: await self._tested()})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _tool(self) -> Any:
        async def bash(command: str) -> str:
            """Run a command in bash. Each call starts a new shell in the task's folder; files are kept.

            Args:
                command: The command; the result is its output and its exit status if that is not 0.
            """
            folder = self._folder
            assert folder is not None
            async with self._waiting:
                if (seconds := self._turn_ends - time.monotonic()) <= 0 or self._lost:
                    raise ToolFailed("earlier commands of this turn took its time")
                characters = self._config.max_result_characters - 100  # for the notes
                given = (command, folder.workdir, dict(folder.variables), seconds, characters)
                try:
                    status, output = await self._call("shell", *given)
                except TerminalLost as error:
                    self._lost = True
                    raise ToolFailed(str(error)) from error
            note = f"(ended after {seconds:.0f} s)" if status is None else f"(exit status {status})"
            shown = (output.strip("\n"), note if status != 0 else "")
            return "\n".join(part for part in shown if part) or "(no output)"

        return bash

    async def _tested(self) -> float:
        """The reward. A sandbox that the policy has made unusable is worth 0."""
        folder = self._folder
        assert folder is not None
        given = (f"bash {folder.test_script}", folder.workdir, dict(folder.test_variables))
        try:
            status, texts = await self._call(
                "test", pack(folder.test_files), *given, self._config.test_seconds, _REWARD_FILES
            )
        except TerminalLost:
            return 0.0
        return reward_in(texts, status, folder, self._config.reward_key)

    async def _call(self, function: str, *arguments: Any) -> Any:
        """What a function of `_INSIDE` returns. Raises TerminalLost and SandboxError."""
        assert self._session is not None
        words = ", ".join(map(repr, arguments))
        execution = await self._session.run(f"print(json.dumps({function}({words})))")
        try:
            return json.loads(execution.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            said = execution.stderr.strip().splitlines()[-1:] or ["its interpreter was ended"]
            limit = f"it exceeded its limit: {execution.ended_by}" if execution.ended_by else said[0]
            raise TerminalLost(f"the sandbox has ended: {limit}") from None


def reward_in(texts: list[str | None], status: int | None, folder: TaskFolder, key: str) -> float:
    """The reward in the texts of `_REWARD_FILES`, None where there is no such file; else by the exit status.

    Raises ValueError for several rewards without the key.
    """
    written, plain = texts
    try:
        if written is not None:
            value = json.loads(written)
            if isinstance(value, dict):
                if len(value) > 1 and key not in value:
                    fix = "set env.reward_key to one of them"
                    raise LookupError(f"{folder.path}: reward.json has {', '.join(value)}; {fix}")
                value = value[key] if key in value else next(iter(value.values()), 0.0)
            reward = float(value)
        elif plain is not None:
            reward = float(plain)
        else:
            reward = float(folder.exit_is_reward and status == 0)
    except LookupError as error:
        raise ValueError(error.args[0]) from error
    except (TypeError, ValueError):  # what the tests have not written
        return 0.0
    return reward if math.isfinite(reward) else 0.0


def pack(copy: Copy) -> str:
    """An archive with the files of a COPY at their places in the sandbox, in base64.

    As in a Dockerfile, the files in a folder are copied and not the folder.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for source in copy.sources:
            whole = f"{copy.target}/{source.name}" if copy.is_folder and source.is_file() else copy.target
            archive.add(source, whole.lstrip("/"))
    return base64.b64encode(buffer.getvalue()).decode()


class TerminalFactory(EnvironmentFactory):
    def __init__(self, config: TerminalEnvConfig) -> None:
        """Raises SandboxUnavailable where no command can be isolated."""
        self.reward_weights, self._config = config.reward_weights, config
        self._sandbox = make_sandbox(config.sandbox)

    def create(self) -> TerminalEnvironment:
        return TerminalEnvironment(self._config, self._session)

    def _session(self, folder: Path) -> SandboxSession:
        """A custom sandbox may have a machine for each task, made from its Dockerfile."""
        make = getattr(self._sandbox, "task_session", None)
        return self._sandbox.session() if make is None else make(folder)

    async def close(self) -> None:
        await self._sandbox.close()
