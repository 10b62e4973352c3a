"""What is known of each run without its steps: how it is going, and the last metrics.

Whether a driver lives is read from the system's table of processes. The lock of the run folder is not tried:
for that moment a run that starts there would be refused.
"""

import json
import os
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from nemorl.observe.files import RunFolderError, read_end
from nemorl.observe.live import Live, read_live
from nemorl.observe.run_folder import RunPaths, read_header

SILENT_SECONDS = 30.0  # without a new live.json: a run on another host is silent then
CLOCK_SECONDS = 2.0  # of difference between the clocks of a process table and of a header
TAIL_BYTES = 64 * 1024

State = Literal[
    "new", "starting", "running", "suspended", "complete", "stopped", "failed", "killed", "silent"
]
LIVING: frozenset[State] = frozenset({"starting", "running", "suspended"})


@dataclass(frozen=True)
class Driver:
    """The process of a run that `.lock` names. It is proven to be the run's if `pid` is given."""

    host: str
    pid: int | None = None
    suspended: bool = False

    @property
    def is_here(self) -> bool:
        return self.host == os.uname().nodename


@dataclass(frozen=True)
class RunStatus:
    state: State
    words: str = ""  # the error of a run that failed, or what is known of another end
    driver: Driver | None = None
    live: Live | None = None


@dataclass(frozen=True)
class RunSummary:
    name: str
    state: State
    words: str
    step: int
    total_steps: int | None
    reward: float | None  # of the last step that has one: of training, or else of a validation
    loss: float | None
    started: float | None  # of the first start; seconds since the epoch
    seconds: float | None  # that its drivers ran
    changed: float  # when metrics or live.json were written last
    algorithm: str
    model: str
    device: str
    problem: str = ""


def run_status(folder: Path, starts: list[dict[str, Any]], now: float | None = None) -> RunStatus:
    """How a run is going, by its header's starts, live.json, and the process that `.lock` names."""
    now, paths = time.time() if now is None else now, RunPaths(folder)
    start = starts[-1] if starts else {}
    end = start.get("end") or {}
    with_live = _live(paths.live)
    driver = _driver(folder, start)
    if end:
        return RunStatus(end.get("outcome", "complete"), end.get("error", ""), driver, with_live)
    began = _seconds(start.get("started"))
    fresh = with_live is not None and (began is None or with_live.written >= began - CLOCK_SECONDS)
    if fresh and with_live is not None and with_live.end is not None:
        return RunStatus(with_live.end.outcome, with_live.end.error, driver, with_live)  # type: ignore[arg-type]
    if driver is None or not starts:
        return RunStatus("new" if not starts else "killed", "", None, with_live)
    if driver.is_here:
        if driver.pid is None:
            words = "its process is gone and left no end: it was killed, or the machine went down"
            return RunStatus("killed", words, driver, with_live)
        state: State = "suspended" if driver.suspended else "running" if fresh else "starting"
        return RunStatus(state, "", driver, with_live)
    written = with_live.written if fresh and with_live is not None else began or 0.0
    if now - written < SILENT_SECONDS:
        return RunStatus("running" if fresh else "starting", "", driver, with_live)
    return RunStatus("silent", f"it ran on {driver.host}, and has written nothing since", driver, with_live)


def _live(path: Path) -> Live | None:
    try:
        return read_live(path)
    except OSError:
        return None


def _driver(folder: Path, start: Mapping[str, Any]) -> Driver | None:
    """The process that `.lock` names, if it is the one that the start of the header describes."""
    try:
        found = re.match(r"(\d+) on (\S+)", (folder / ".lock").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    if found is None:
        return None
    driver = Driver(found[2])
    if not driver.is_here:
        return driver
    try:
        process = psutil.Process(int(found[1]))
        command, began = start.get("command"), _seconds(start.get("started"))
        status = process.status()
        if began is None or status == psutil.STATUS_ZOMBIE or process.create_time() > began + CLOCK_SECONDS:
            return driver
        if not command or not _runs(process.cmdline(), command):
            return driver
        return replace(driver, pid=process.pid, suspended=status == psutil.STATUS_STOPPED)
    except psutil.Error:
        return driver


def _runs(arguments: list[str], command: str) -> bool:
    """Whether a process was started with the command of a header, which is without the interpreter."""
    expected = shlex.split(command)[1:]
    return not expected or arguments[-len(expected) :] == expected


def _seconds(text: Any) -> float | None:
    """A time of a header in seconds since the epoch."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None


class RunList:
    """Summaries of runs. A run whose files have not changed is not read again."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Any, list[dict[str, Any]], dict[str, Any]]] = {}

    def summary(self, name: str, folder: Path) -> RunSummary:
        paths = RunPaths(folder)
        stats = [stamp(path) for path in (paths.header, paths.metrics)]
        known = self._known.get(folder)
        if known is None or known[0] != stats:
            known = self._known[folder] = (stats, *self._read(paths))
        _, starts, last = known
        status = run_status(folder, starts)
        facts = starts[-1].get("run", {}) if starts else {}
        live = status.live
        written = [each[0] / 1e9 for each in (*stats, stamp(paths.live)) if each is not None]
        total = live.total_steps if live is not None else whole(facts.get("steps"))
        return RunSummary(
            name,
            status.state,
            status.words,
            int(last.get("step", live.step if live is not None else 0)),
            total,
            _number(last, "reward/mean", "validation/reward"),
            _number(last, "loss/policy", "loss/sft", "loss/preference", "loss/total"),
            _seconds(starts[0].get("started")) if starts else None,
            seconds_of(starts, max(written, default=0.0)),
            max(written, default=0.0),
            facts.get("algorithm", ""),
            facts.get("model", ""),
            facts.get("policy device", ""),
            last.get("problem", ""),
        )

    @staticmethod
    def _read(paths: RunPaths) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Starts of the header, and the last line of metrics.jsonl."""
        try:
            starts, problem = [*read_header(paths.header)], ""
        except (OSError, RunFolderError) as error:
            starts, problem = [], str(error)
        return starts, {**last_line(paths.metrics), **({"problem": problem} if problem else {})}


def seconds_of(starts: list[dict[str, Any]], written: float) -> float | None:
    """Seconds from each start of a header to its end, or, if it was killed, until it wrote for the last time.

    `written` is that time of the last start; a resume has noted that of the one before.
    """
    known = []
    for place, start in enumerate(starts):
        ended = _seconds((start.get("end") or {}).get("time") or start.get("last_written"))
        began = _seconds(start.get("started"))
        if ended is None and place == len(starts) - 1:
            ended = written
        if began is not None and ended is not None:
            known.append(max(0.0, ended - began))
    return sum(known) if known else None


def last_line(path: Path) -> dict[str, Any]:
    """The last complete object of a file of JSON lines; empty if there is none near its end."""
    try:
        lines = read_end(path, TAIL_BYTES)[0].split(b"\n")[:-1]  # what follows the last line break is partial
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def stamp(path: Path) -> tuple[int, int] | None:
    """When a file was written, in nanoseconds since the epoch, and its size; None if it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _number(line: Mapping[str, Any], *names: str) -> float | None:
    for name in names:
        if isinstance(value := line.get(name), int | float):
            return float(value)
        if value := (line.get("nonfinite") or {}).get(name):
            return float(value)
    return None


def whole(text: Any) -> int | None:
    """The number of a fact of a header, if it is one."""
    return int(text) if isinstance(text, str) and text.isdecimal() else None
