"""Trackers of a run, each in a process of its own: one that fails, hangs or is offline costs a warning.

driver ── queue ── thread ── JSON lines through a pipe ──▶ tracker_process ──▶ the tracker's package

The pipe ends with the driver, even if it is killed; the process then completes its record.
"""

import contextlib
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import Any

from nemorl.config.run import LoggerConfig
from nemorl.config.trackers import TrackerConfig, missing_trackers

from .files import TrackerMissing
from .metrics import StepMetrics
from .run_folder import RunFolder

_MAX_WAITING = 10_000  # messages for a tracker that is slower than the run
CLOSE_SECONDS = 60.0  # for uploading what is left

logger = logging.getLogger(__name__)


class TrackerProcess:
    """A tracker for one start of a run. No method raises for what happens to the tracker, or waits for it."""

    def __init__(
        self, config: TrackerConfig, folder: RunFolder, *, close_seconds: float = CLOSE_SECONDS
    ) -> None:
        self.name = config.name
        self._close_seconds = close_seconds
        self._log = folder.paths.logs / f"tracker-{config.name}.log"
        self._messages: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._has_failed = False
        start = {
            "tracker": config.model_dump(mode="json"),
            "folder": str(folder.paths.trackers),
            "run": folder.paths.root.name,
            "config": str(folder.paths.config),
            "resumed_step": folder.resumed_step,
        }
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "nemorl.observe.tracker_process"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the driver
                )
        except OSError as error:
            self._fail(str(error))
            return
        self._put(start)
        self._writer = threading.Thread(target=self._write, name=f"tracker {config.name}", daemon=True)
        self._writer.start()

    def log(self, metrics: StepMetrics) -> None:
        """Report the metrics of a step."""
        values = {key: value if math.isfinite(value) else str(value) for key, value in metrics.values.items()}
        self._put({"step": metrics.step, "values": values})

    def rewind(self, step: int) -> None:
        """Steps after this one come again."""
        self._put({"rewind": step})

    def close(self) -> None:
        """Wait until the tracker has everything, within the seconds that it was given."""
        if self._has_failed:
            self._end()
            return
        with contextlib.suppress(queue.Full):
            self._messages.put_nowait(None)
        try:
            status = self._process.wait(self._close_seconds)
        except subprocess.TimeoutExpired:
            self._fail(f"it was not done {self._close_seconds:g} s after the end of the run")
            self._end()
            return
        if status:
            self._fail(self._last_line() or f"exit status {status}")

    def _put(self, message: dict[str, Any]) -> None:
        if self._has_failed:
            return
        try:
            self._messages.put_nowait(json.dumps(message))
        except queue.Full:
            self._fail(f"{_MAX_WAITING} messages wait for it")

    def _write(self) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        with self._process.stdin as pipe:
            try:
                while (message := self._messages.get()) is not None:
                    pipe.write(f"{message}\n".encode())
                    pipe.flush()
            except (OSError, ValueError):  # the process has ended
                self._process.wait()
                self._fail(self._last_line() or f"exit status {self._process.returncode}")

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            lost = f"metrics.jsonl has all metrics, the tracker may lack some (log: {self._log})"
            logger.warning("The tracker %s has failed: %s; %s.", self.name, reason, lost)

    def _end(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""


def check_trackers(config: LoggerConfig) -> None:
    """Raise `TrackerMissing` when the package of a tracker is not installed."""
    for tracker in missing_trackers(config.trackers):
        fix = f"pip install '{tracker.requirement}', or remove it from logger.trackers"
        raise TrackerMissing(f"logger.trackers has {tracker.name}, and its package is not installed: {fix}.")


def open_trackers(config: LoggerConfig, folder: RunFolder) -> list[TrackerProcess]:
    """Start the trackers of a run. Raises `TrackerMissing`."""
    check_trackers(config)
    return [TrackerProcess(tracker, folder) for tracker in config.trackers]
