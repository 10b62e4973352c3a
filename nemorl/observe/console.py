"""Progress of a run: bars and a table of steps on a terminal, plain lines elsewhere.

Text for metrics and stages, the same in bars, in plain lines and in the report.
"""

import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console as RichConsole
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from nemorl.config.run import LoggerConfig

from .metrics import SHOWN, Change, Shown, StepMetrics
from .timeline import Stage, StageListener

COLUMNS = tuple(row for row in SHOWN if row.column)
VALIDATION = "validation/"


def format_number(value: float, digits: int = 4) -> str:
    """`digits` significant digits; integers with thousands separated."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def format_seconds(seconds: float) -> str:
    """`8.3 s`, `4 min 10 s` or `2 h 05 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def format_progress(stage: Stage) -> str:
    """How far a stage is: `34/128 trajectories, 410 tokens/s`; empty when nothing is counted."""
    parts = []
    if stage.total is not None or stage.done:
        total = "" if stage.total is None else f"/{stage.total:,}"
        parts.append(f"{stage.done:,}{total} {stage.unit}".rstrip())
    if stage.tokens:
        parts.append(f"{format_number(round(stage.tokens / max(stage.seconds, 1e-9)))} tokens/s")
    return ", ".join(parts)


def choose_columns(values: Mapping[str, float], width: int) -> tuple[Shown, ...]:
    """The columns for which a run has metrics, as many as fit into `width`, by priority."""
    chosen, room = set(), width
    for row in sorted(COLUMNS, key=lambda row: row.priority):
        if row.prefix in values and row.width <= room:
            chosen.add(row)
            room -= row.width
    return tuple(row for row in COLUMNS if row in chosen)


def table_header(columns: Sequence[Shown]) -> str:
    """The header of the table of steps."""
    return "".join(f"{row.column:>{row.width}}" for row in columns)


def table_row(columns: Sequence[Shown], values: Mapping[str, float]) -> str:
    """The metrics of one step under `table_header`; `-` for a missing one."""
    cells = (format_number(values[c.prefix], digits=3) if c.prefix in values else "-" for c in columns)
    return "".join(f"{cell:>{column.width}}" for column, cell in zip(columns, cells, strict=True))


def describe_step(metrics: StepMetrics) -> str:
    """The metrics of one step as words: `reward 0.5, loss 0.01, seconds 3.2`."""
    present = (row for row in COLUMNS if row.prefix in metrics.values)
    return ", ".join(f"{row.column} {format_number(metrics.values[row.prefix], digits=3)}" for row in present)


def describe_losses(metrics: StepMetrics) -> str | None:
    """What a step lost: trajectories with an error, and updates whose gradients are not finite, or all 0."""
    found = {key: value for key, value in metrics.values.items() if value > 0}
    parts = [
        f"{key} {format_number(value)}"
        for key, value in found.items()
        if key == "errors" or key.startswith("reward_errors/")
    ]
    if parts:
        parts[-1] += " (why: logs/rollout-*.log)"
    if skipped := found.get("updates/skipped"):
        parts.append(f"skipped {format_number(skipped)} of {format_number(found['updates/all'])} updates")
    if empty := found.get("updates/empty"):
        parts.append(
            f"nothing to learn in {format_number(empty)} of {format_number(found['updates/all'])} updates"
        )
    if skipped := found.get("critic/skipped_updates"):
        parts.append(f"critic skipped {format_number(skipped)} updates")
    return ", ".join(parts) or None


def describe_validation(metrics: StepMetrics) -> str | None:
    """The metrics of the validation after a step, if there was one."""
    found = {
        key.removeprefix(VALIDATION): v for key, v in metrics.values.items() if key.startswith(VALIDATION)
    }
    shown = [
        f"{name} {format_number(value)}{_between(name, found)}"
        for name, value in found.items()
        if name.removesuffix("_low").removesuffix("_high") not in found.keys() - {name}
    ]
    return ", ".join(shown) or None


def _between(name: str, metrics: Mapping[str, float]) -> str:
    """The interval of a metric that has one."""
    low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    return "" if low is None or high is None else f" ({format_number(low)} to {format_number(high)})"


class PlainConsole:
    """Writes whole lines. A stage longer than `slow_seconds` is mentioned, then ever less often."""

    def __init__(self, stream: TextIO, *, total_steps: int, slow_seconds: float = 10.0) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._slow_seconds = slow_seconds
        self._timers: dict[int, threading.Timer] = {}  # by id of the running stage
        self._writing = threading.Lock()

    def stage_started(self, stage: Stage) -> None:
        """Start the timer that mentions a long stage."""
        self._mention_later(stage, self._slow_seconds)

    def stage_advanced(self, stage: Stage) -> None:
        """Progress is written only by the clock."""

    def stage_finished(self, stage: Stage) -> None:
        """Stop the clock; a stage that was mentioned gets its end mentioned too."""
        self._timers.pop(id(stage)).cancel()
        if stage.seconds > self._slow_seconds:
            self._line(_describe(stage, f"{stage.outcome} after {format_seconds(stage.seconds)}"))

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        """The line of the step comes with its metrics."""

    def header(self, facts: Mapping[str, str]) -> None:
        """One fact a line."""
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self._line(f"{name:<{width}}  {value}")

    def step(self, metrics: StepMetrics) -> None:
        """One line of metrics, with what was lost at its end, and one for the validation."""
        place = f"step {metrics.step}/{self._total_steps}"
        texts = [text for text in (describe_step(metrics), describe_losses(metrics)) if text]
        if texts:
            self._line(f"{place}: {', '.join(texts)}")
        if validation := describe_validation(metrics):
            self._line(f"{place}, validation: {validation}")

    def summary(self, changes: Sequence[Change], report: Path | None) -> None:
        """One metric a line, then the path of the report."""
        for change in changes:
            before, after = _metric(change.before), _metric(change.after)
            self._line(f"{change.metric}: {before} before, {after} after")
        if report is not None:
            self._line(f"report: {report}")

    def logging_handler(self) -> logging.Handler:
        """Log lines among the others."""
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        return handler

    def close(self) -> None:
        """Stop all clocks."""
        for timer in self._timers.values():
            timer.cancel()

    def _mention_later(self, stage: Stage, seconds: float) -> None:
        timer = threading.Timer(seconds, self._mention, (stage, seconds))
        timer.daemon = True
        self._timers[id(stage)] = timer
        timer.start()

    def _mention(self, stage: Stage, waited: float) -> None:
        self._line(_describe(stage, f"{format_seconds(stage.seconds)} so far"))
        if id(stage) in self._timers:
            self._mention_later(stage, 2 * waited)

    def _line(self, text: str) -> None:
        with self._writing:
            self._stream.write(text + "\n")
            self._stream.flush()


def _describe(stage: Stage, state: str) -> str:
    progress = format_progress(stage)
    return f"{stage.name}: {state}" + (f" ({progress})" if progress else "")


def _metric(value: float | None) -> str:
    return "not measured" if value is None else format_number(value)


STAGE_WIDTH = 12  # characters, so that the bars stay in place when stages come and go
RECENT_STEPS = 10  # from which the remaining time is guessed


class BarConsole:
    """A bar for the steps and one for each running stage; what is printed scrolls above them."""

    def __init__(self, terminal: RichConsole, *, total_steps: int, first_step: int = 0) -> None:
        self._terminal = terminal
        self._total_steps = total_steps
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds of the last steps
        self._columns: tuple[Shown, ...] = ()
        self._stages: dict[int, TaskID] = {}  # by id of the running stage
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn(f"{{task.description:<{STAGE_WIDTH}}}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=terminal,
            transient=True,
        )
        self._steps = self._progress.add_task(
            "steps", total=total_steps, completed=first_step, detail=f"{first_step}/{total_steps}"
        )
        self._progress.start()

    def stage_started(self, stage: Stage) -> None:
        """Add a bar; it pulses when the total is unknown."""
        self._stages[id(stage)] = self._progress.add_task(stage.name, total=stage.total, detail="")

    def stage_advanced(self, stage: Stage) -> None:
        """Move the bar."""
        self._progress.update(self._stages[id(stage)], completed=stage.done, detail=format_progress(stage))

    def stage_finished(self, stage: Stage) -> None:
        """Take the bar away."""
        self._progress.remove_task(self._stages.pop(id(stage)))

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        """Move the bar of the steps and guess the time that remains."""
        if step > 0:
            self._recent.append(seconds)
        left = (self._total_steps - step) * sum(self._recent) / max(len(self._recent), 1)
        guess = f", {format_seconds(left)} left" if self._recent and left else ""
        self._progress.update(self._steps, completed=step, detail=f"{step}/{self._total_steps}{guess}")

    def header(self, facts: Mapping[str, str]) -> None:
        """Facts in two columns."""
        grid = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            grid.add_row(Text(name, style="bold"), Text(value))
        self._terminal.print(grid)

    def step(self, metrics: StepMetrics) -> None:
        """One row of the table; the heading comes with the first."""
        place = f"{metrics.step}/{self._total_steps}"
        width = 2 * len(str(self._total_steps)) + 3
        columns = self._columns or choose_columns(metrics.values, self._terminal.width - width)
        # Line 0 of a run holds a validation only: the columns come with the first step that has metrics.
        if not self._columns and any(column.prefix != "time/step" for column in columns):
            self._columns = columns
            self._print(f"{'step':>{width}}{table_header(columns)}", "bold")
        if any(column.prefix in metrics.values for column in self._columns if column.prefix != "time/step"):
            self._print(f"{place:>{width}}{table_row(self._columns, metrics.values)}")
        if lost := describe_losses(metrics):
            self._print(f"{place:>{width}}  lost: {lost}", "yellow")
        if validation := describe_validation(metrics):
            self._print(f"{place:>{width}}  validation: {validation}", "cyan")

    def summary(self, changes: Sequence[Change], report: Path | None) -> None:
        """A table of what changed, then the report's path; the bars are gone by then."""
        self._progress.stop()
        table = Table("metric")
        for name in ("before", "after", "change"):
            table.add_column(name, justify="right")
        for change in changes:
            table.add_row(escape(change.metric), *_cells(change))
        if changes:
            self._terminal.print(table)
        if report is not None:
            self._print(f"report: {report}", "bold")

    def logging_handler(self) -> logging.Handler:
        """Log lines above the bars."""
        return RichHandler(console=self._terminal, show_path=False, markup=False, log_time_format="%X")

    def close(self) -> None:
        """Take the bars away."""
        self._progress.stop()

    def _print(self, line: str, style: str = "") -> None:
        self._terminal.print(Text(line, style=style), soft_wrap=True, highlight=False)


def _cells(change: Change) -> tuple[str, str, str]:
    """Before, after, and the difference with its sign."""
    before = "-" if change.before is None else format_number(change.before)
    after = "-" if change.after is None else format_number(change.after)
    if change.before is None or change.after is None:
        return before, after, "-"
    difference = change.after - change.before
    return before, after, ("+" if difference > 0 else "") + format_number(difference)


class Console(StageListener, Protocol):
    """Shows a run. Stages arrive as to every listener; the rest is called by the observer."""

    def header(self, facts: Mapping[str, str]) -> None:
        """What runs here."""
        ...

    def step(self, metrics: StepMetrics) -> None:
        """The metrics of a finished step."""
        ...

    def summary(self, changes: Sequence[Change], report: Path | None) -> None:
        """What the run achieved."""
        ...

    def logging_handler(self) -> logging.Handler:
        """A handler that writes log lines without breaking the bars."""
        ...

    def close(self) -> None:
        """Take the bars away."""
        ...


def open_console(
    config: LoggerConfig, *, total_steps: int, first_step: int = 0, stream: TextIO | None = None
) -> Console:
    """The console that the config asks for. `first_step` is the last step done before this start."""
    stream = stream or sys.stdout
    terminal = RichConsole(file=stream)
    has_bars = terminal.is_terminal and not terminal.is_dumb_terminal
    if config.console == "rich" or (config.console == "auto" and has_bars):
        return BarConsole(terminal, total_steps=total_steps, first_step=first_step)
    return PlainConsole(stream, total_steps=total_steps)
