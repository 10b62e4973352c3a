"""Stages of a run: one `with` gives the seconds in the metrics, a span in timeline.json and a progress bar.

with stages.stage("generation", total=64, unit="trajectories") as stage:
    stage.advance(4)
seconds = stages.finish_step(step)   # {"time/generation": 3.2, "time/step": 3.4}
"""

import json
import os
import time
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .files import write_failed


def format_seconds(seconds: float) -> str:
    """Return `8.3 s`, `4 min 10 s` or `2 h 05 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


@dataclass(eq=False)
class Stage:
    name: str
    listeners: Sequence["StageListener"]
    total: int | None  # units of progress expected, if known
    unit: str  # of progress, in the plural
    done: int = 0
    tokens: int = 0  # generated or trained so far, if they are counted
    outcome: Literal["done", "failed", "interrupted"] = "done"  # once it is over
    shares: dict[str, float] = field(default_factory=dict)  # fraction of the seconds by other stage names
    started: float = field(default_factory=lambda: time.time())  # seconds since the epoch, for the timeline
    begin: float = field(default_factory=lambda: time.perf_counter())
    end: float | None = None

    @property
    def seconds(self) -> float:
        return (time.perf_counter() if self.end is None else self.end) - self.begin

    @property
    def progress(self) -> str:
        """Text such as `34/128 trajectories, 410 tokens/s`; empty when nothing is counted."""
        parts = []
        if self.total is not None or self.done:
            total = "" if self.total is None else f"/{self.total:,}"
            parts.append(f"{self.done:,}{total} {self.unit}".rstrip())
        if self.tokens:
            parts.append(f"{round(self.tokens / max(self.seconds, 1e-9)):,} tokens/s")
        return ", ".join(parts)

    def advance(self, count: int = 1, *, tokens: int = 0) -> None:
        self.done += count
        self.tokens += tokens
        for listener in self.listeners:
            listener.stage_advanced(self)

    def share(self, name: str, fraction: float) -> None:
        """Count this fraction of the seconds under another name, as of environments during generation."""
        if not 0 <= fraction <= 1 - sum(self.shares.values()) + 1e-9:
            raise ValueError(f"stage {self.name}: {fraction} is no fraction of what is left of it for {name}")
        self.shares[name] = fraction


class StageListener:
    """Receives the events of stages; ignores those it does not override."""

    def stage_started(self, stage: Stage) -> None: ...

    def stage_advanced(self, stage: Stage) -> None: ...

    def stage_finished(self, stage: Stage) -> None: ...

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        """All stages of a step are over. `started` is in seconds since the epoch."""


class Stages:
    def __init__(self, listeners: Sequence[StageListener]) -> None:
        self._listeners = listeners
        self._seconds: dict[str, float] = {}
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._started, self._begin = time.time(), time.perf_counter()

    @contextmanager
    def stage(
        self, name: str, *, total: int | None = None, unit: str = "", outside_step: bool = False
    ) -> Iterator[Stage]:
        """Time a stage; those of one name add up. The clock of a step starts after `outside_step` stages."""
        stage = Stage(name, self._listeners, total, unit)
        for listener in self._listeners:
            listener.stage_started(stage)
        try:
            yield stage
        except (KeyboardInterrupt, CancelledError):
            stage.outcome = "interrupted"
            raise
        except BaseException:
            stage.outcome = "failed"
            raise
        finally:
            stage.end = time.perf_counter()
            if outside_step:
                self._restart_clock()
            else:
                for part, fraction in [(name, 1 - sum(stage.shares.values())), *stage.shares.items()]:
                    self._seconds[part] = self._seconds.get(part, 0.0) + fraction * stage.seconds
            for listener in self._listeners:
                listener.stage_finished(stage)

    def finish_step(self, step: int) -> dict[str, float]:
        total = time.perf_counter() - self._begin
        for listener in self._listeners:
            listener.step_finished(step, self._started, total)
        seconds = {f"time/{name}": value for name, value in self._seconds.items()} | {"time/step": total}
        self._seconds = {}
        self._restart_clock()
        return seconds


STEP_TRACK = 0
OPENING, CLOSING = b"[\n", b"]\n"


class Timeline(StageListener):
    """Writes timeline.json in the Chrome trace format, which Perfetto opens: a track for each stage name.

    The JSON array is complete after every event. A resumed run is another process in it.
    """

    def __init__(self, path: Path, title: str = "run") -> None:
        """Open the file, or continue it after its last complete event. Raises `WriteError`."""
        self._path = path
        self._tracks: dict[str, int] = {}
        try:
            path.touch()
            self._file = path.open("r+b", buffering=0)
            first, *events = self._file.read().splitlines(keepends=True) or [b""]
            is_new = first != OPENING
            complete = 0 if is_new else sum(len(line) for line in events if line.endswith(b"}\n"))
            self._end = len(OPENING) + complete  # position of the closing bracket
            self._file.truncate(0 if is_new else self._end)
            if is_new:
                self._file.seek(0)
                self._file.write(OPENING + CLOSING)
        except OSError as error:
            raise write_failed(path, error) from error
        self._append("M", "process_name", STEP_TRACK, args={"name": title})
        self._append("M", "thread_name", STEP_TRACK, args={"name": "steps"})

    def stage_finished(self, stage: Stage) -> None:
        if stage.name not in self._tracks:
            self._tracks[stage.name] = len(self._tracks) + 1
            self._append("M", "thread_name", self._tracks[stage.name], args={"name": stage.name})
        details: dict[str, Any] = {"done": stage.done, "unit": stage.unit} if stage.unit else {}
        if stage.outcome != "done":
            details["outcome"] = stage.outcome
        self._span(stage.name, self._tracks[stage.name], stage.started, stage.seconds, details)

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        self._span(f"step {step}", STEP_TRACK, started, seconds, {"step": step})

    def close(self) -> None:
        self._file.close()

    def _span(self, name: str, track: int, started: float, seconds: float, details: dict[str, Any]) -> None:
        self._append("X", name, track, ts=round(started * 1e6), dur=round(seconds * 1e6), args=details)

    def _append(self, kind: str, name: str, track: int, **fields: Any) -> None:
        """Put the event where the closing bracket is, with a new bracket behind it."""
        event = {"ph": kind, "name": name, "pid": os.getpid(), "tid": track, **fields}
        line = (b"," if self._end > len(OPENING) else b"") + json.dumps(event).encode() + b"\n"
        try:
            self._file.seek(self._end)
            if self._file.write(line + CLOSING) != len(line + CLOSING):
                raise OSError(28, "No space left on device")
        except OSError as error:
            self._file.truncate(self._end)
            raise write_failed(self._path, error) from error
        self._end += len(line)
