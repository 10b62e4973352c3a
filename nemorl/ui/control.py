"""Starts, stops and resumes runs, as a person does in a terminal.

A run is a process of its own session, whose output goes to a file, so it outlives the server and the browser.
A signal is sent only to a process that is proven to be the run's driver (`run_status`).
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from nemorl.config.load import load_experiment
from nemorl.errors import NemorlError
from nemorl.observe.files import RunFolderError
from nemorl.observe.run_folder import RunPaths, read_header
from nemorl.slurm.status import cancel
from nemorl.slurm.submission import latest_submission

from .errors import UiError
from .folders import Folders
from .runs import LIVING, RunStatus, run_status

OUTPUT = "output.log"  # in the folder of logs: what the command printed
CHECK_SECONDS = 120.0
END_SECONDS = 60.0  # of a process whose run has ended, until it is gone
BEGIN_SECONDS = 120.0  # until the run folder holds a run
POLL_SECONDS = 0.1
WORDS_BYTES = 4000  # of the output, if a start fails
MAX_STARTS = 100  # whose ids are known


@dataclass(frozen=True)
class Started:
    run: str  # its name in requests
    pid: int


class Control:
    """A request that is repeated with the same id starts once."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._starts: dict[str, asyncio.Future[Started]] = {}

    async def start(self, config: Path, request_id: str) -> Started:
        """Check an experiment and train it. Raises UiError with the command's words."""
        return await self._once(request_id, lambda: self._start(config))

    async def resume(self, run: str, folder: Path, request_id: str) -> Started:
        """Continue a run from its newest checkpoint."""
        return await self._once(request_id, lambda: self._resume(run, folder))

    async def _once(self, request_id: str, begin: Callable[[], Awaitable[Started]]) -> Started:
        if not request_id:
            raise UiError(400, "the request has no id", "id")
        if request_id not in self._starts:
            while len(self._starts) >= MAX_STARTS:
                self._starts.pop(next(iter(self._starts)))
            self._starts[request_id] = asyncio.ensure_future(begin())
        # A page that is closed meanwhile does not end the start.
        return await asyncio.shield(self._starts[request_id])

    async def _start(self, config: Path) -> Started:
        await self._check(config)
        try:
            experiment = await asyncio.to_thread(load_experiment, config)
        except NemorlError as error:  # changed since the check
            raise UiError(422, str(error), str(config)) from error
        folder = self._folders.root / experiment.run_dir
        run = self._folders.name(folder)
        if run is None:
            fix = f"set run_dir to a folder below {self._folders.root}"
            raise UiError(
                422, f"run_dir = {experiment.run_dir} is not below the folder of the server", "run_dir", fix
            )
        return await self._begin(run, folder, [str(config)])

    async def _resume(self, run: str, folder: Path) -> Started:
        deadline = time.monotonic() + END_SECONDS
        while (driver := (status := status_of(folder)).driver) is not None and driver.pid is not None:
            if status.state in LIVING or time.monotonic() > deadline:
                raise UiError(409, f"the run is {status.state}: process {driver.pid} has not ended", run)
            await asyncio.sleep(POLL_SECONDS)
        # Quoted: a value on the command line is YAML, in which a name may have a meaning.
        quoted = json.dumps(str(folder), ensure_ascii=False)
        words = [str(RunPaths(folder).config), f"run_dir={quoted}", "--resume"]
        return await self._begin(run, folder, words)

    async def _check(self, config: Path) -> None:
        command = [sys.executable, "-m", "nemorl.cli", "check", str(config)]
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self._folders.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), CHECK_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise UiError(422, f"`nemorl check` has not ended in {CHECK_SECONDS:g} s", str(config)) from None
        if process.returncode:
            raise UiError(422, output.decode(errors="replace").strip(), str(config))

    async def _begin(self, run: str, folder: Path, words: Sequence[str]) -> Started:
        """Start `nemorl train`, and wait until the run folder is its own or it has ended."""
        logs = RunPaths(folder).logs
        began = time.time()
        try:
            logs.mkdir(parents=True, exist_ok=True)
            with (logs / OUTPUT).open("ab") as output:
                offset = output.seek(0, os.SEEK_END)
                process = subprocess.Popen(
                    [sys.executable, "-m", "nemorl.cli", "train", *words],
                    cwd=self._folders.root,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise UiError(422, f"cannot write {logs / OUTPUT}: {error.strerror}", str(logs)) from error
        while process.poll() is None and time.time() - began < BEGIN_SECONDS:
            with suppress(OSError):
                if RunPaths(folder).header.stat().st_mtime >= began:
                    return Started(run, process.pid)
            await asyncio.sleep(POLL_SECONDS)
        if process.poll() is None:
            return Started(run, process.pid)
        words_of_end = await asyncio.to_thread(_words, logs / OUTPUT, offset)
        raise UiError(422, f"nemorl train has ended with status {process.returncode}:\n{words_of_end}", run)


def stop(run: str, folder: Path) -> int:
    """Send SIGTERM to the driver: the first lets a run save its last step, the second ends it at once.

    Returns the process. Raises UiError where there is none on this machine.
    """
    status = status_of(folder)
    driver = status.driver
    if driver is None or driver.pid is None:
        if driver is not None and not driver.is_here and status.state in ("running", "starting"):
            fix = f"send SIGTERM to it on {driver.host}, or cancel its job"
            raise UiError(409, f"the run's driver is a process on {driver.host}", run, fix)
        raise UiError(409, f"the run is {status.state}: it has no process to stop", run)
    try:
        process = psutil.Process(driver.pid)
        process.send_signal(signal.SIGTERM)  # psutil refuses if the number is another process's by now
        if status.state == "suspended":
            process.send_signal(signal.SIGCONT)  # it sees no other signal before
    except psutil.NoSuchProcess:
        raise UiError(409, "the run has just ended", run) from None
    except psutil.AccessDenied:
        raise UiError(403, f"process {driver.pid} is another user's", run) from None
    return driver.pid


def cancel_job(run: str, folder: Path) -> list[str]:
    """Cancel a run's Slurm job, which saves its last step; the states after. Raises UiError."""
    try:
        if latest_submission(folder) is None:
            raise UiError(409, "the run was not submitted to Slurm", run)
        return [f"job {row.job}: {row.state}" for row in cancel(folder)]
    except (NemorlError, OSError, ValueError) as error:
        raise UiError(422, str(error), run) from error


def status_of(folder: Path) -> RunStatus:
    """Raises UiError for a corrupt header, which cannot prove a process to be the run's."""
    try:
        return run_status(folder, read_header(RunPaths(folder).header))
    except RunFolderError as error:
        raise UiError(409, str(error), str(folder)) from error


def _words(path: Path, offset: int) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(offset, os.fstat(file.fileno()).st_size - WORDS_BYTES))
        return file.read().decode(errors="replace").strip()
    return ""
