"""`nemorl train --supervise`: restarts a run whose driver dies or fails, until it is complete.

The run is a child process; it is restarted with `--resume`, as a requeued job of Slurm is, and with the same
bound on restarts in a row without progress: a checkpoint of a later step than all before, on disk or in
memory. Processes that the run leaves behind are ended before the next start.
"""

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

import psutil

from nemorl.config.experiment import Experiment
from nemorl.observe.run_folder import RunPaths, read_header
from nemorl.slurm.ray_node import die_with_parent
from nemorl.slurm.start import MAX_RESTARTS, newest_step, newest_step_in, parse_max_restarts

from .terminal import ExitCode, complain

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # passed on to the run
# A start after which another would end the same way, or that ended as requested.
FINAL = (ExitCode.WELL, ExitCode.REFUSED, ExitCode.STOPPED, ExitCode.INTERRUPTED)
ORPHAN_SECONDS = 30.0  # for the processes of a run that died to end on their own
# Titles of Ray's processes that have nothing to save, but look for their raylet for half a minute.
RAY_AGENTS = "ray::DashboardAgent", "ray::RuntimeEnvAgent"
_POLL_SECONDS = 0.2
_PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl


class Failure(NamedTuple):
    start: int  # of the run, from 1
    error: str  # empty of one that was killed


class Supervisor:
    def __init__(self, experiment: Experiment, arguments: Sequence[str]) -> None:
        """`arguments` of `nemorl train`, without `--supervise` and `--resume`."""
        self._experiment, self._arguments = experiment, [*arguments]
        self._max_restarts = parse_max_restarts(os.environ)
        self._run: subprocess.Popen[bytes] | None = None
        self._stopping = False  # a signal came
        self._unsent: list[int] = []  # signals for the run

    def run(self, *, resume: bool) -> int:
        """Return the exit status of the last start."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the run become our children
        for number in SIGNALS:
            signal.signal(number, self._pass_on)
        furthest, without_progress = self._newest_step(), 0
        failure = self._failure()._replace(error="")  # of an earlier command: its cause may be gone
        while True:
            status = self._start(resume)
            end_orphans()
            how = (
                f"was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"failed (exit status {status})"
            )
            if status in FINAL or self._stopping:
                return status if status >= 0 else ExitCode.FAILED
            step = self._newest_step()
            without_progress = without_progress + 1 if step <= furthest else 0
            furthest = max(furthest, step)
            earlier, failure = failure, self._failure()
            recurs = failure.start > earlier.start and failure.error == earlier.error != ""
            place, reason = f"newest checkpoint: step {step}" if step else "no checkpoint yet", ""
            if without_progress > self._max_restarts:
                bound = f"({MAX_RESTARTS} = {self._max_restarts})"
                reason = f"{without_progress} starts in a row wrote no new checkpoint {bound}"
            elif without_progress and recurs:
                reason = "A restart without progress had the same error"
            outcome = f"{reason}: giving up" if reason else "Restarting with --resume"
            complain(f"The run {how}; {place}. {outcome}.")
            if reason:
                return ExitCode.FAILED
            resume = True

    def _start(self, resume: bool) -> int:
        command = [sys.executable, "-m", "nemorl.cli", "train", *self._arguments, *(["--resume"] * resume)]
        # A group of its own: Ctrl-C reaches it through us alone. It stops in order if we are killed.
        self._run = subprocess.Popen(command, process_group=0, preexec_fn=_stop_with_parent)
        try:
            self._send()
            return self._wait(self._run)
        finally:
            self._run = None

    def _wait(self, run: "subprocess.Popen[bytes]") -> int:
        """The exit status of the run, whose driver is killed if it stays stopped, as by SIGSTOP."""
        seconds, killed_at = self._experiment.cluster.deadlines.stall, math.inf
        while True:
            try:
                pid, status = os.waitpid(run.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:  # a signal that was passed on has found its end
                return run.wait()
            if pid == 0:
                if time.monotonic() > killed_at:
                    run.kill()
                time.sleep(_POLL_SECONDS)
            elif os.WIFSTOPPED(status):
                killed_at = time.monotonic() + seconds
                number, fix = signal.Signals(os.WSTOPSIG(status)).name, f"kill -CONT {run.pid} continues it"
                complain(f"The driver is stopped by {number}: {fix}; it is killed after {seconds:g} s.")
            elif os.WIFCONTINUED(status):
                killed_at = math.inf
            else:
                run.returncode = os.waitstatus_to_exitcode(status)
                return run.returncode

    def _newest_step(self) -> int:
        """Step from which a restart continues."""
        run_dir, parent = self._experiment.run_dir, self._experiment.checkpointing.memory_dir
        name = RunPaths(run_dir).memory_folder()
        return max(newest_step(run_dir), newest_step_in(parent / name) if name else 0)

    def _failure(self) -> Failure:
        starts = read_header(RunPaths(self._experiment.run_dir).header)
        end = starts[-1].get("end", {}) if starts else {}
        return Failure(len(starts), end.get("error", ""))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        self._unsent.append(number)
        self._send()

    def _send(self) -> None:
        """Each signal once: a second one would end the run without a checkpoint."""
        with suppress(IndexError):  # a signal that comes here has sent the rest
            while self._run is not None:
                self._run.send_signal(self._unsent.pop(0))
                self._run.send_signal(signal.SIGCONT)  # if it is stopped


def _stop_with_parent() -> None:
    die_with_parent(signal.SIGTERM)


def end_orphans() -> None:
    """Wait until this process has no children, and kill agents of Ray, and others after `ORPHAN_SECONDS`."""
    end = time.monotonic() + ORPHAN_SECONDS
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has ended
                if time.monotonic() > end or " ".join(child.cmdline()).startswith(RAY_AGENTS):
                    child.kill()
        time.sleep(_POLL_SECONDS)
