"""timeline.json: when each stage ran, in the Chrome trace format; Perfetto and chrome://tracing open it.

The file is a complete JSON array after every event. If a crash cuts off the last line, it still opens: the
format allows an array without its closing bracket ("Trace Event Format", section "JSON Array Format").

What the driver is doing: one `with` gives the seconds in the metrics, a span in the timeline and a bar.

with stages.stage("generation", total=64, unit="trajectories") as stage:
    ...
    stage.advance(4)
seconds = stages.finish_step(step)   # {"time/generation": 3.2, "time/step": 3.4}
"""

import json
import os
import time
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from .files import JsonObject, write_failed

Outcome = Literal["done", "failed", "interrupted"]


class Stage:
    """One stage while it runs, and its seconds after it."""

    def __init__(
        self, name: str, listeners: Sequence["StageListener"], *, total: int | None, unit: str
    ) -> None:
        self.name = name
        self.total = total  # units of progress expected, if known
        self.unit = unit  # what is counted, in the plural
        self.done = 0
        self.tokens = 0  # generated or trained so far, if they are counted
        self.outcome: Outcome = "done"  # once it is over
        self.started = time.time()  # seconds since the epoch, for the timeline
        self.shares: dict[str, float] = {}  # fraction of the stage's seconds by other stage names
        self._begin = time.perf_counter()
        self._end: float | None = None
        self._listeners = listeners

    @property
    def seconds(self) -> float:
        """Seconds so far, or of the whole stage once it is over."""
        return (time.perf_counter() if self._end is None else self._end) - self._begin

    def advance(self, count: int = 1, *, tokens: int = 0) -> None:
        """Report `count` more finished units, with their tokens."""
        self.done += count
        self.tokens += tokens
        for listener in self._listeners:
            listener.stage_advanced(self)

    def share(self, name: str, fraction: float) -> None:
        """Count this fraction of the stage's seconds under another name.

        For work that is interwoven with the stage, such as environments during generation: the seconds of
        all names still add up to the time that passed.
        """
        if not 0 <= fraction <= 1 - sum(self.shares.values()) + 1e-9:
            raise ValueError(f"stage {self.name}: {fraction} is no fraction of what is left of it for {name}")
        self.shares[name] = fraction

    def finish(self) -> None:
        """Stop the clock."""
        self._end = time.perf_counter()


class StageListener(Protocol):
    """Receives the events of stages."""

    def stage_started(self, stage: Stage) -> None:
        """A stage begins."""
        ...

    def stage_advanced(self, stage: Stage) -> None:
        """`stage.done` or `stage.tokens` has grown."""
        ...

    def stage_finished(self, stage: Stage) -> None:
        """A stage is over, by success or by an error: `stage.outcome` says which."""
        ...

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        """All stages of a step are over. `started` is in seconds since the epoch."""
        ...


class Stages:
    """Sums the seconds of the stages of one step after the other."""

    def __init__(self, listeners: Sequence[StageListener]) -> None:
        self._listeners = listeners
        self._seconds: dict[str, float] = {}
        self._restart_step()

    @contextmanager
    def stage(
        self, name: str, *, total: int | None = None, unit: str = "", outside_step: bool = False
    ) -> Iterator[Stage]:
        """Time a stage; several with one name add up, stages may overlap.

        `outside_step` is for work such as starting the workers: it is shown, but belongs to no step, and the
        clock of the next step starts after it.
        """
        stage = Stage(name, self._listeners, total=total, unit=unit)
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
            stage.finish()
            if outside_step:
                self._restart_step()
            else:
                self._count(stage)
            for listener in self._listeners:
                listener.stage_finished(stage)

    def finish_step(self, step: int) -> dict[str, float]:
        """Seconds by `time/<stage>` and `time/step` since the step before, and start over."""
        total = time.perf_counter() - self._step_begin
        for listener in self._listeners:
            listener.step_finished(step, self._step_started, total)
        seconds = {f"time/{name}": value for name, value in self._seconds.items()} | {"time/step": total}
        self._seconds = {}
        self._restart_step()
        return seconds

    def _count(self, stage: Stage) -> None:
        own = 1 - sum(stage.shares.values())
        for name, fraction in [(stage.name, own), *stage.shares.items()]:
            self._seconds[name] = self._seconds.get(name, 0.0) + fraction * stage.seconds

    def _restart_step(self) -> None:
        self._step_started = time.time()
        self._step_begin = time.perf_counter()


STEP_TRACK = 0
END = b"]\n"


class Timeline:
    """Writes one span a stage, each stage's name on a track of its own, so overlapping shows as such.

    A resumed run continues in the same file as another process, so steps that were repeated show twice.
    """

    def __init__(self, path: Path, title: str = "run") -> None:
        """Open the file, or continue it. Raises `WriteError`."""
        self._path = path
        self._process = os.getpid()
        self._tracks: dict[str, int] = {}
        try:
            path.touch()
            self._file = path.open("r+b", buffering=0)
            self._end = self._end_of_events()  # position of the closing bracket
        except OSError as error:
            raise write_failed(path, error) from error
        self._name("process_name", STEP_TRACK, title)
        self._name("thread_name", STEP_TRACK, "steps")

    def stage_started(self, stage: Stage) -> None:
        """Nothing is written before a stage's length is known."""

    def stage_advanced(self, stage: Stage) -> None:
        """Progress is not drawn."""

    def stage_finished(self, stage: Stage) -> None:
        """Add the stage's span."""
        if stage.name not in self._tracks:
            self._tracks[stage.name] = len(self._tracks) + 1
            self._name("thread_name", self._tracks[stage.name], stage.name)
        arguments: JsonObject = {"done": stage.done, "unit": stage.unit} if stage.unit else {}
        if stage.outcome != "done":
            arguments["outcome"] = stage.outcome
        self._span(stage.name, self._tracks[stage.name], stage.started, stage.seconds, arguments)

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        """Add the step's span."""
        self._span(f"step {step}", STEP_TRACK, started, seconds, {"step": step})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _name(self, kind: str, track: int, name: str) -> None:
        self._append({"ph": "M", "name": kind, "pid": self._process, "tid": track, "args": {"name": name}})

    def _span(self, name: str, track: int, started: float, seconds: float, arguments: JsonObject) -> None:
        microseconds = {"ts": round(started * 1e6), "dur": round(seconds * 1e6)}
        self._append(
            {"ph": "X", "name": name, "pid": self._process, "tid": track, **microseconds, "args": arguments}
        )

    def _append(self, event: JsonObject) -> None:
        """Put the event where the closing bracket is, with a new bracket behind it."""
        line = (b"," if self._end > len(b"[\n") else b"") + json.dumps(event).encode() + b"\n"
        try:
            self._file.seek(self._end)
            written = self._file.write(line + END)
            if written != len(line + END):
                raise OSError(28, "No space left on device")
        except OSError as error:
            self._file.truncate(self._end)
            raise write_failed(self._path, error) from error
        self._end += len(line)

    def _end_of_events(self) -> int:
        """The offset behind the last whole event; a new file gets its opening bracket."""
        lines = self._file.read().splitlines(keepends=True)
        if not lines or lines[0] != b"[\n":
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(b"[\n" + END)
            return len(b"[\n")
        whole = [line for line in lines[1:] if line.endswith(b"}\n")]
        end = len(lines[0]) + sum(map(len, whole))
        self._file.truncate(end)
        return end
