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
from typing import Any

from nemorl.config.environment import ProgramEnvConfig
from nemorl.trajectories import EnvironmentFactory, Episode, EpisodeEnvironment, Model, Task

KEPT_BYTES = 2**20  # of stdout and stderr, from the end
POLL_SECONDS = 0.02
KILL_ROUNDS = 100  # each ends what processes have started since the last one
SHOWN_CHARACTERS = 500  # of stderr in an error
# What programs need to find themselves; other variables of the worker may hold secrets.
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "VIRTUAL_ENV")
_PROCESSES = Path("/proc")


class ProgramFailed(RuntimeError):
    """The program did not start, or said by its exit status that it failed."""


class ProgramEnvironment(EpisodeEnvironment):
    """One process, which ends with all that it has started."""

    def __init__(self, config: ProgramEnvConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._mark = b""  # in the environment of each process of the episode

    async def run(self, task: Task, model: Model) -> Episode:
        """Raises ProgramFailed, and TimeoutError after the time limit."""
        seconds = self._config.time_limit_seconds
        try:
            async with asyncio.timeout(seconds):
                status, output, errors = await self._communicate(task, model)
        except TimeoutError:
            raise TimeoutError(f"the program has not ended within {seconds:g} s") from None
        finally:
            await self.close()
        if status:
            shown = errors.decode(errors="replace").strip()[-SHOWN_CHARACTERS:]
            raise ProgramFailed(f"{self._config.command[0]} ended with status {status}: {shown}")
        return read_episode(output.decode(errors="replace"))

    async def _communicate(self, task: Task, model: Model) -> tuple[int, bytes, bytes]:
        """Exit status, stdout and stderr."""
        names = (*_INHERITED, *self._config.pass_environment)
        variables = {name: os.environ[name] for name in names if name in os.environ}
        variables |= {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": model.api_key}
        variables["OPENAI_MODEL"] = model.name
        self._mark = f"OPENAI_API_KEY={model.api_key}".encode()
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._config.command, env=variables, start_new_session=True, **pipes
            )
        except OSError as error:
            raise ProgramFailed(f"cannot start {self._config.command[0]}: {error.strerror}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        reading = [asyncio.ensure_future(_end_of(pipe)) for pipe in (process.stdout, process.stderr)]
        try:
            with suppress(ConnectionError):  # of a program that reads no task
                process.stdin.write(_as_json(task))
                await process.stdin.drain()
            process.stdin.close()
            status = await _status_of(process)
            await self.close()  # what still holds the pipes
            output, errors = await asyncio.gather(*reading)
        finally:
            for one in reading:
                one.cancel()
        return status, output, errors

    async def close(self) -> None:
        """End the process and all that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(_end_marked, self._mark)
        await _status_of(process)


async def _status_of(process: asyncio.subprocess.Process) -> int:
    """Wait for its end. `wait` of asyncio also waits for its pipes, which other processes may hold."""
    while process.returncode is None:
        await asyncio.sleep(POLL_SECONDS)
    return process.returncode


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


async def _end_of(pipe: asyncio.StreamReader) -> bytes:
    kept = b""
    while piece := await pipe.read(2**16):
        kept = (kept + piece)[-KEPT_BYTES:]
    return kept


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
