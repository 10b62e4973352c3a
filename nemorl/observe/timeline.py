"""Stages of a run: one `with` gives the seconds in the metrics, a span in timeline.json and a progress bar.

with stages.stage("generation", total=64, unit="trajectories") as stage:
    stage.advance(4)
seconds = stages.finish_step(step)   # {"time/generation": 3.2, "time/step": 3.4}
"""

import json
import os
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
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

    def work_finished(self, work: "StepWork") -> None:
        """What the processes did in the step that has just finished."""


class OpenStages(StageListener):
    """The stages that run now, also for other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: tuple[Stage, ...] = ()

    def stage_started(self, stage: Stage) -> None:
        with self._lock:
            self._stages = (*self._stages, stage)

    def stage_finished(self, stage: Stage) -> None:
        with self._lock:
            self._stages = tuple(other for other in self._stages if other is not stage)


Span = tuple[float, float]  # begin and end, in seconds of `time.perf_counter`


@dataclass(frozen=True)
class Work:
    """When the processes of one kind worked."""

    spans: Sequence[Sequence[Span]]  # of each part that works on its own; those of a part may overlap
    is_awaited: bool = True  # the driver waits for each span, and continues when it ends
    has_all: bool = True  # no work is missing, so that the rest of the time was idle


@dataclass(frozen=True)
class StepWork:
    started: float  # seconds since the epoch
    busy: Mapping[str, Sequence[Span]]  # disjoint, in seconds since the start, by kind of processes
    critical: Sequence[tuple[str, Span]]  # of the complete step, in order


@dataclass(frozen=True)
class Wait:
    span: Span
    shares: Mapping[str, float]  # by name; they add up to 1


DRAWN = 1 / 200  # of a step is the shortest gap in the work of a kind that the timeline shows


def merge_spans(spans: Iterable[Span], begin: float, end: float, gap: float = 0.0) -> list[Span]:
    """Return what the spans cover between `begin` and `end`, in order; no gap is shorter than `gap`."""
    merged: list[Span] = []
    for first, last in sorted(spans):
        first, last = max(first, begin), min(last, end)
        if merged and first <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        elif first < last:
            merged.append((first, last))
    return merged


def critical_path(waits: Sequence[Wait], begin: float, end: float) -> list[tuple[str, Span]]:
    """Return for all times between `begin` and `end` what the driver waited for, last first.

    Goes back from the end: of what has ended, the last to end is what the driver waited for, since it began.
    Between two of them the driver itself worked.
    """
    path, now = [], end
    for wait in sorted(waits, key=lambda wait: wait.span[1], reverse=True):
        first, last = max(wait.span[0], begin), wait.span[1]
        if last > now or first >= last:  # another ended later
            continue
        if last < now:
            path.append(("driver", (last, now)))
        now = last
        for name, share in wait.shares.items():
            path.append((name, (max(first, now - share * (last - first)), now)))
            now = path[-1][1][0]
        now = first
    return [*path, ("driver", (begin, now))] if begin < now else path


class Stages:
    def __init__(self, listeners: Sequence[StageListener]) -> None:
        self._listeners = listeners
        self._seconds: dict[str, float] = {}
        self._waits: list[Wait] = []
        self._restart_clock()

    def listen(self, listener: StageListener) -> None:
        """Report the stages that begin from now on to this listener too."""
        self._listeners = [*self._listeners, listener]

    def _restart_clock(self) -> None:
        self._started, self._begin = time.time(), time.perf_counter()

    @contextmanager
    def stage(
        self,
        name: str,
        *,
        total: int | None = None,
        unit: str = "",
        outside_step: bool = False,
        waits_for: str = "",
    ) -> Iterator[Stage]:
        """Time a stage; those of one name add up. The clock of a step starts after `outside_step` stages.

        `waits_for` is the kind of processes that the driver waits for, doing nothing else.
        """
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
                rest = 1 - sum(stage.shares.values())
                for part, fraction in [(name, rest), *stage.shares.items()]:
                    self._seconds[part] = self._seconds.get(part, 0.0) + fraction * stage.seconds
                if waits_for:
                    self._waits.append(Wait((stage.begin, stage.end), {waits_for: rest, **stage.shares}))
            for listener in self._listeners:
                listener.stage_finished(stage)

    def discard_step(self) -> None:
        """Forget the stages of the step in progress, which starts again."""
        self._seconds, self._waits = {}, []
        self._restart_clock()

    def finish_step(
        self, step: int, take_work: Callable[[float], Mapping[str, Work]] | None = None
    ) -> dict[str, float]:
        """End a step: its seconds by stage and, with what `take_work` returns, idle shares and critical path.

        `idle/KIND` is the share of the step in which processes had no work, as a mean over them.
        `critical/KIND` is the share in which the driver waited for them; all of these add up to 1.
        """
        end = time.perf_counter()
        total = end - self._begin
        for listener in self._listeners:
            listener.step_finished(step, self._started, total)
        metrics = {f"time/{name}": value for name, value in self._seconds.items()} | {"time/step": total}
        if take_work is not None and total > 0:
            metrics |= self._attribute(take_work(end), end)
        self.discard_step()
        return metrics

    def _attribute(self, work: Mapping[str, Work], end: float) -> dict[str, float]:
        begin, metrics, waits = self._begin, {}, list(self._waits)
        for kind, of_kind in work.items():
            if of_kind.has_all:
                busy = [merge_spans(spans, begin, end) for spans in of_kind.spans]
                seconds = sum(last - first for spans in busy for first, last in spans)
                metrics[f"idle/{kind}"] = max(0.0, 1 - seconds / (len(busy) * (end - begin)))
            if of_kind.is_awaited:
                waits += [Wait(span, {kind: 1.0}) for spans in of_kind.spans for span in spans]
        path = critical_path(waits, begin, end)
        names = dict.fromkeys(
            [*(kind for kind in work if work[kind].is_awaited), *(name for name, _ in path)]
        )
        for name in names:
            seconds = sum(last - first for other, (first, last) in path if other == name)
            metrics[f"critical/{name}"] = seconds / (end - begin)
        step_work = self._step_work(work, path, end)
        for listener in self._listeners:
            listener.work_finished(step_work)
        return metrics

    def _step_work(self, work: Mapping[str, Work], path: Sequence[tuple[str, Span]], end: float) -> StepWork:
        """The same to look at: without what is too short to see."""
        begin, gap = self._begin, DRAWN * (end - self._begin)
        busy = {kind: merge_spans(chain(*one.spans), begin, end, gap) for kind, one in work.items()}
        since = {kind: [(first - begin, last - begin) for first, last in busy[kind]] for kind in busy}
        critical: list[tuple[str, Span]] = []
        for name, (first, last) in reversed(path):
            if critical and (name == critical[-1][0] or last - first < gap):
                critical[-1] = critical[-1][0], (critical[-1][1][0], last - begin)
            else:
                critical.append((name, (first - begin, last - begin)))
        return StepWork(self._started, since, critical)


STEP_TRACK = 0
OPENING, CLOSING = b"[\n", b"]\n"


class Timeline(StageListener):
    """Writes timeline.json in the Chrome trace format, which Perfetto opens: a track for each stage name, for
    the work of each kind of processes, and for the critical path.

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
        details: dict[str, Any] = {"done": stage.done, "unit": stage.unit} if stage.unit else {}
        if stage.outcome != "done":
            details["outcome"] = stage.outcome
        self._span(stage.name, self._track(stage.name), stage.started, stage.seconds, details)

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        self._span(f"step {step}", STEP_TRACK, started, seconds, {"step": step})

    def work_finished(self, work: StepWork) -> None:
        for kind, spans in work.busy.items():
            for first, last in spans:
                self._span(kind, self._track(f"processes: {kind}"), work.started + first, last - first, {})
        for name, (first, last) in work.critical:
            self._span(name, self._track("critical path"), work.started + first, last - first, {})

    def close(self) -> None:
        self._file.close()

    def _track(self, name: str) -> int:
        if name not in self._tracks:
            self._tracks[name] = len(self._tracks) + 1
            self._append("M", "thread_name", self._tracks[name], args={"name": name})
        return self._tracks[name]

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
