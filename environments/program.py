"""An agent that is a program in any language: it gets the task on stdin and an OpenAI endpoint of the policy.

stdin    {"index": 0, "messages": [{"role": "user", "content": "…"}], "answer": "…", "columns": {…}}
stdout   anything; its last JSON object may say {"rewards": {"name": 1.0}}
"""

import asyncio
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from nemorl.config.environment import ProgramEnvConfig
from nemorl.trajectories import EnvironmentFactory, Episode, EpisodeEnvironment, Model, Task

KEPT_BYTES = 2**20  # of stdout and stderr, from the end
PIPE_SECONDS = 1.0  # for what is in the pipes, where a process that was not found holds them
KILL_ROUNDS = 100  # each ends what processes have started since the last one
SHOWN_CHARACTERS = 500  # of stderr in an error
# What programs need to find themselves; other variables of the worker may hold secrets.
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "VIRTUAL_ENV")
_PROCESSES = Path("/proc")


class ProgramFailed(RuntimeError):
    """The program did not start, or said by its exit status that it failed."""


class _Program(asyncio.SubprocessProtocol):
    """The end of a program, and what it has written so far. Belongs to one event loop."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()  # the program itself; other processes may still hold its pipes
        self.closed = asyncio.Event()  # stdout and stderr
        self.output, self.errors = b"", b""
        self._open = {0, 1, 2}

    @property
    def reads(self) -> bool:
        """True while stdin is open."""
        return 0 in self._open

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self.output = (self.output + data)[-KEPT_BYTES:]
        else:
            self.errors = (self.errors + data)[-KEPT_BYTES:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open & {1, 2}:
            self.closed.set()

    def process_exited(self) -> None:
        self.ended.set()


class ProgramEnvironment(EpisodeEnvironment):
    """One process, which ends with all that it has started."""

    def __init__(self, config: ProgramEnvConfig) -> None:
        self._config = config
        self._started: tuple[asyncio.SubprocessTransport, _Program] | None = None
        self._mark = b""  # in the environment of each process of the episode

    async def run(self, task: Task, model: Model) -> Episode:
        """Raises ProgramFailed, and TimeoutError after the time limit."""
        seconds = self._config.time_limit_seconds
        try:
            async with asyncio.timeout(seconds):
                transport, program = await self._start(task, model)
                await program.ended.wait()
        except TimeoutError:
            raise TimeoutError(f"the program has not ended within {seconds:g} s") from None
        finally:
            await self.close()
        if status := transport.get_returncode():
            shown = program.errors.decode(errors="replace").strip()[-SHOWN_CHARACTERS:]
            raise ProgramFailed(f"{self._config.command[0]} ended with status {status}: {shown}")
        return read_episode(program.output.decode(errors="replace"))

    async def _start(self, task: Task, model: Model) -> tuple[asyncio.SubprocessTransport, _Program]:
        names = (*_INHERITED, *self._config.pass_environment)
        variables = {name: os.environ[name] for name in names if name in os.environ}
        variables |= {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": model.api_key}
        variables["OPENAI_MODEL"] = model.name
        self._mark = f"OPENAI_API_KEY={model.api_key}".encode()
        try:
            self._started = transport, _ = await asyncio.get_running_loop().subprocess_exec(
                _Program, *self._config.command, env=variables, start_new_session=True
            )
        except OSError as error:
            raise ProgramFailed(f"cannot start {self._config.command[0]}: {error.strerror}") from error
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(_as_json(task))  # waits for nothing: a program need not read its task
        stdin.write_eof()
        return self._started

    async def close(self) -> None:
        """End the process and all that it has started."""
        started, self._started = self._started, None
        if started is None:
            return
        transport, program = started
        with suppress(ProcessLookupError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        await asyncio.to_thread(_end_marked, self._mark)
        await program.ended.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(program.closed.wait(), PIPE_SECONDS)
        stdin = transport.get_pipe_transport(0)
        if program.reads and isinstance(stdin, asyncio.WriteTransport):
            stdin.abort()  # `close` would wait until a process that holds it has read the task
        transport.close()


def _end_marked(mark: bytes) -> None:
    """End the processes with this in their environment: also those that have left the group."""
    for _ in range(KILL_ROUNDS):
        found = False
        for folder in _PROCESSES.glob("[0-9]*"):
            with suppress(OSError):  # of another user, or ended
                is_zombie = not (variables := (folder / "environ").read_bytes())
                if not is_zombie and mark in variables.split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)  # one that is killed takes a moment to end


def _as_json(task: Task) -> bytes:
    messages = [message.as_dict() for message in task.messages]
    whole = {"index": task.index, "messages": messages, "answer": task.answer, "columns": task.columns}
    return json.dumps(whole, default=str).encode() + b"\n"


def read_episode(output: str) -> Episode:
    """The rewards in the last JSON object among the lines. Raises ValueError if they cannot be used."""
    for line in reversed(output.splitlines()):
        if not line.lstrip().startswith("{"):
            continue
        try:
            said = json.loads(line)
        except ValueError:
            continue
        rewards = said.get("rewards", {})
        if not isinstance(rewards, dict) or not all(_is_number(value) for value in rewards.values()):
            raise ValueError(f"the rewards on stdout are {rewards!r}; write an object of names and numbers")
        return Episode(rewards={name: float(value) for name, value in rewards.items()})
    return Episode()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


class ProgramFactory(EnvironmentFactory):
    def __init__(self, config: ProgramEnvConfig) -> None:
        self.reward_weights = config.reward_weights
        self._config = config

    def create(self) -> ProgramEnvironment:
        return ProgramEnvironment(self._config)
