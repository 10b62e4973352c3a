"""Child processes of a launcher: in groups of their own, gone when it is gone, ended with their children."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Child:
    """A running process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use `start`."""
        self._process = process
        self.ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], output: Path | None = None
    ) -> Self:
        """Start a command; what it says is added to `output`, or goes where our own words go.

        It gets a session of its own: what Slurm signals is the launcher's process group, and each child is
        told by the launcher, in order.
        """
        if output is None:
            return cls(await _started(command, environment, None))
        with output.open("ab") as log:
            return cls(await _started(command, environment, log.fileno()))

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self, seconds: float) -> int:
        """SIGTERM, and after `seconds` SIGKILL to its group; its exit status, negative for a signal."""
        self.tell(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(self.ended)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return await self.ended


async def _started(
    command: Sequence[str], environment: Mapping[str, str], output: int | None
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
