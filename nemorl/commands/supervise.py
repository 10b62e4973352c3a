"""`nemorl train --supervise`: restarts a run whose driver dies or fails, until it is complete.

The run is a child process; it is restarted with `--resume`, as a requeued job of Slurm is, and with the same
bound on restarts without a new checkpoint. Processes that it leaves behind are ended before the next start.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from nemorl.slurm.start import MAX_RESTARTS, newest_step, parse_max_restarts

from .terminal import ExitCode, complain

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # passed on to the run
# A start after which another would end the same way, or that ended as requested.
FINAL = (ExitCode.WELL, ExitCode.REFUSED, ExitCode.STOPPED, ExitCode.INTERRUPTED)
ORPHAN_SECONDS = 30.0  # for the processes of a run that died to end on their own
_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl


class Supervisor:
    def __init__(self, run_dir: Path, words: Sequence[str]) -> None:
        """`words` are those of `nemorl train`, without `--supervise` and `--resume`."""
        self._run_dir, self._words = run_dir, [*words]
        self._max_restarts = parse_max_restarts(os.environ)
        self._run: subprocess.Popen[bytes] | None = None
        self._signal: signal.Signals | None = None  # the first one

    def run(self, *, resume: bool) -> int:
        """Return the exit status of the last start."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the run become our children
        for number in SIGNALS:
            signal.signal(number, self._pass_on)
        without_progress = 0
        while True:
            before = newest_step(self._run_dir)
            status = self._start(resume)
            end_orphans()
            how = (
                f"was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"failed (exit status {status})"
            )
            if status in FINAL or self._signal is not None:
                return status if status >= 0 else ExitCode.FAILED
            step = newest_step(self._run_dir)
            without_progress = without_progress + 1 if step <= before else 0
            place = f"newest checkpoint: step {step}" if step else "no checkpoint yet"
            if without_progress > self._max_restarts:
                starts = f"{without_progress} starts in a row wrote no new checkpoint"
                complain(
                    f"The run {how}; {place}. {starts} ({MAX_RESTARTS} = {self._max_restarts}): giving up."
                )
                return ExitCode.FAILED
            complain(f"The run {how}; {place}. Restarting with --resume.")
            resume = True

    def _start(self, resume: bool) -> int:
        command = [sys.executable, "-m", "nemorl.cli", "train", *self._words, *(["--resume"] * resume)]
        # A group of its own: Ctrl-C reaches it through us alone. It stops in order if we are killed.
        self._run = subprocess.Popen(command, process_group=0, preexec_fn=_die_with_parent)
        if self._signal is not None:  # it came before there was a process to pass it on to
            self._run.send_signal(self._signal)
        return self._run.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number)
        if self._run is not None:
            self._run.send_signal(number)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end_orphans() -> None:
    """Wait until this process has no children, and end those that are left after `ORPHAN_SECONDS`."""
    end = time.monotonic() + ORPHAN_SECONDS
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        if time.monotonic() > end:
            for pid in _children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _children() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text(encoding="ascii").split()]
