"""Observer of a run: writes its files and its log, shows it on the console, reports to trackers.

with Observer(folder, experiment.logger, total_steps=200) as observer:
    with observer.stage("generation", total=64, unit="trajectories") as stage: stage.advance(tokens=31)
    values = {"reward/mean": 0.4, "tokens/trained": 5120} | observer.end_step(1)
    observer.step(1, version=1, values=values)
"""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from nemorl.config.run import LoggerConfig

from .files import JsonLinesWriter, WriteError
from .index import COLUMNS as INDEX_COLUMNS
from .index import IndexWriter, TrajectoryRow
from .live import LiveEnd, LiveFile
from .metrics import SHOWN, Change, Sample, Shown, StepMetrics, format_number
from .run_folder import RunFolder
from .timeline import Stage, StageListener, Stages, Timeline, Work, format_seconds
from .trackers import open_trackers

if TYPE_CHECKING:
    from .prometheus import PrometheusEndpoint

logger = logging.getLogger(__name__)

GENERATED = "throughput/generated_tokens_per_second"
RATES = {
    "throughput/tokens_per_second": ("tokens/trained", "time/step"),
    GENERATED: ("tokens/generated", "time/generation"),
}


class Observer:
    """Records and shows one start of a run inside its `with`. Raises `TrackerMissing` and `WriteError`."""

    def __init__(
        self,
        folder: RunFolder,
        config: LoggerConfig,
        *,
        total_steps: int,
        samples_ahead: bool = False,
        deadlines: Mapping[str, float] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """With `samples_ahead` the time of the stage `generation` is only what the run waited for samples.

        `deadlines` are seconds by name of the stage, to be shown.
        """
        self.folder, self._rates = folder, dict(RATES)
        if samples_ahead:
            self._rates[GENERATED] = ("tokens/generated", "time/step")
        paths = folder.paths
        self._trackers = open_trackers(config, folder)
        self._metrics = JsonLinesWriter(paths.metrics)
        self._samples = JsonLinesWriter(paths.samples)
        timeline = Timeline(paths.timeline, title=paths.root.name)
        first = folder.resumed_step or 0
        self._console = open_console(config, total_steps=total_steps, first_step=first, stream=stream)
        self._prometheus = open_prometheus(config, folder)
        self._index: IndexWriter | None = None  # opened by the first rows
        if (paths.trajectories / INDEX_COLUMNS).exists():
            self._open_index().keep_until(-1 if folder.resumed_step is None else first)
        self.live = LiveFile(paths.live, total_steps, first, deadlines)
        listeners = [] if self._prometheus is None else [self._prometheus]
        self._stages = Stages([self._console, timeline, self.live, *listeners])
        self.stage, self.listen = self._stages.stage, self._stages.listen
        self.take_work: Callable[[float], Mapping[str, Work]] | None = None  # of the run's processes
        self._open = ExitStack()
        self._open.callback(folder.close)
        for tracker in self._trackers:
            self._open.callback(tracker.close)
        if self._prometheus is not None:
            self._open.callback(self._prometheus.close)
        for file in (self._metrics, self._samples, timeline):
            self._open.callback(file.close)
        self._open.enter_context(_run_log(self._console.logging_handler(), paths.logs / "driver.log"))
        self._open.callback(self._console.close)
        self.live.start()

    def header(self, facts: Mapping[str, str]) -> None:
        if self._prometheus is not None:
            facts = {**facts, "prometheus": self._prometheus.url}
        self.folder.add_facts(facts)
        self._console.header(facts)

    def end_step(self, step: int) -> dict[str, float]:
        """End the step's time; metrics of it, which are part of its values."""
        return self._stages.finish_step(step, self.take_work)

    def step(self, step: int, *, version: int, values: Mapping[str, float]) -> StepMetrics:
        """Record an ended step, before its checkpoint: a resume needs the line. Raises `WriteError`."""
        throughput = {
            name: values[tokens] / values[stage]
            for name, (tokens, stage) in self._rates.items()
            if tokens in values and values.get(stage, 0) > 0
        }
        metrics = StepMetrics(step, version, {**values, **throughput})
        self._metrics.append(metrics.to_json())
        for tracker in self._trackers:
            tracker.log(metrics)
        if self._prometheus is not None:
            self._prometheus.step(metrics)
        self._console.step(metrics)
        return metrics

    def rewind(self, step: int) -> None:
        """Discard what was recorded after a step, as a resumed run does."""
        for file in (self._metrics, self._samples):
            file.keep(lambda line: int(line["step"]) <= step)
        for tracker in self._trackers:
            tracker.rewind(step)
        self.live.rewind(step)
        if self._index is not None:
            self._index.keep_until(step)
        self._stages.discard_step()

    def samples(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._samples.append(asdict(sample))

    def trajectories(self, rows: Sequence[TrajectoryRow]) -> None:
        """Add them to the index. What cannot be written costs a warning."""
        try:
            self._open_index().append(rows)
        except WriteError as error:
            logger.warning("Trajectories are missing in the index: %s", error)

    def _open_index(self) -> IndexWriter:
        if self._index is None:
            self._index = IndexWriter(self.folder.paths.trajectories)
        return self._index

    def summary(self, changes: Sequence[Change]) -> Path | None:
        """Write the report and show it; one that cannot be written is a warning: its sources are complete."""
        from .report import write_report  # Plotly

        root, report = self.folder.paths.root, None
        try:
            report = write_report(root)
        except WriteError as error:
            logger.warning("%s Everything else is there; `nemorl report %s` tries again.", error, root)
        self._console.summary(changes, report)
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.live.close(LiveEnd(*self.folder.record_end(error)))
        self._open.close()


def open_prometheus(config: LoggerConfig, folder: RunFolder) -> "PrometheusEndpoint | None":
    """The endpoint; without one, with a warning, where its address is taken by now."""
    if config.prometheus is None:
        return None
    from .prometheus import PrometheusEndpoint

    try:
        return PrometheusEndpoint(config.prometheus, folder.paths.root.name)
    except OSError as error:
        where = f"{config.prometheus.host}:{config.prometheus.port}"
        logger.warning("Metrics are not served to Prometheus: cannot listen on %s (%s).", where, error)
        return None


class _LogFile(logging.FileHandler):
    """A log without errors of its own: lines that cannot be written are dropped, as on a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback for the line."""

    def close(self) -> None:
        with suppress(OSError):  # a failing flush must not replace the error that ends the run
            super().close()


@contextmanager
def _run_log(console: logging.Handler, file: Path) -> Iterator[None]:
    console.setLevel(logging.WARNING)
    to_file = _LogFile(file, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root, ours = logging.getLogger(), logging.getLogger("nemorl")
    level = ours.level
    ours.setLevel(logging.INFO)
    # The handler of the command line prints until a run has a console; with both, warnings come twice.
    replaced = [other for other in root.handlers if type(other) is logging.StreamHandler]
    for other in replaced:
        root.removeHandler(other)
    for handler in (console, to_file):
        root.addHandler(handler)
    try:
        yield
    finally:
        ours.setLevel(level)
        for handler in (console, to_file):
            root.removeHandler(handler)
            handler.close()
        for other in replaced:
            root.addHandler(other)


COLUMNS = tuple(row for row in SHOWN if row.column)


def choose_columns(values: Mapping[str, float], width: int) -> tuple[Shown, ...]:
    """Return the columns for which a run has metrics, as many as fit into `width`, by priority."""
    chosen, room = set(), width
    for row in sorted(COLUMNS, key=lambda row: row.priority):
        if row.prefix in values and row.width <= room:
            chosen.add(row)
            room -= row.width
    return tuple(row for row in COLUMNS if row in chosen)


def describe_losses(values: Mapping[str, float]) -> list[str]:
    """Return what a step lost: trajectories with an error, updates skipped or without a gradient."""
    lost = {key: format_number(value) for key, value in values.items() if value > 0}
    errors = ", ".join(f"{k} {n}" for k, n in lost.items() if k == "errors" or k.startswith("reward_errors/"))
    texts = {
        "updates/skipped": "skipped {} of {} updates",
        "updates/empty": "nothing to learn in {} of {} updates",
        "critic/skipped_updates": "critic skipped {} updates",
    }
    limited = [key for key in lost if key.startswith("guards/") and key != "guards/rollbacks"]
    parts = [f"{errors} (why: logs/rollout-*.log)"] if errors else []
    if limited:
        beyond = ", ".join(f"{key.removeprefix('guards/')} {lost[key]}" for key in limited)
        parts.append(f"updates beyond limits: {beyond}")
    return parts + [t.format(lost[key], lost.get("updates/all")) for key, t in texts.items() if key in lost]


def describe_validation(values: Mapping[str, float]) -> list[str]:
    prefix, parts = "validation/", []
    found = {k.removeprefix(prefix): format_number(v) for k, v in values.items() if k.startswith(prefix)}
    for name, value in found.items():
        if name.removesuffix("_low").removesuffix("_high") in found.keys() - {name}:
            continue  # shown with the metric that it bounds
        low, high = found.get(f"{name}_low"), found.get(f"{name}_high")
        parts.append(f"{name} {value}" + (f" ({low} to {high})" if low and high else ""))
    return parts


class PlainConsole(StageListener):
    """Writes complete lines. A stage longer than `slow_seconds` is mentioned, then ever less often."""

    def __init__(self, stream: TextIO, *, total_steps: int, slow_seconds: float = 10.0) -> None:
        self._stream, self._total_steps, self._slow_seconds = stream, total_steps, slow_seconds
        self._timers: dict[int, threading.Timer] = {}  # by id of the running stage
        self._writing = threading.Lock()

    def stage_started(self, stage: Stage) -> None:
        self._mention_later(stage, self._slow_seconds)

    def stage_finished(self, stage: Stage) -> None:
        self._timers.pop(id(stage)).cancel()
        if stage.seconds > self._slow_seconds:  # it was mentioned before
            self._mention(stage, f"{stage.outcome} after {format_seconds(stage.seconds)}")

    def header(self, facts: Mapping[str, str]) -> None:
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self._line(f"{name:<{width}}  {value}")

    def step(self, metrics: StepMetrics) -> None:
        values, label = metrics.values, f"step {metrics.step}/{self._total_steps}"
        parts = [f"{c.column} {format_number(values[c.prefix], 3)}" for c in COLUMNS if c.prefix in values]
        if parts := [*parts, *describe_losses(values)]:
            self._line(f"{label}: {', '.join(parts)}")
        if parts := describe_validation(values):
            self._line(f"{label}, validation: {', '.join(parts)}")

    def summary(self, changes: Sequence[Change], report: Path | None) -> None:
        for change in changes:
            both = (change.before, change.after)
            before, after = ("not measured" if value is None else format_number(value) for value in both)
            self._line(f"{change.metric}: {before} before, {after} after")
        if report is not None:
            self._line(f"report: {report}")

    def logging_handler(self) -> logging.Handler:
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        return handler

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _mention_later(self, stage: Stage, seconds: float) -> None:
        def mention() -> None:
            self._mention(stage, f"{format_seconds(stage.seconds)} so far")
            if id(stage) in self._timers:
                self._mention_later(stage, 2 * seconds)

        timer = self._timers[id(stage)] = threading.Timer(seconds, mention)
        timer.daemon = True
        timer.start()

    def _mention(self, stage: Stage, state: str) -> None:
        self._line(f"{stage.name}: {state}" + (f" ({stage.progress})" if stage.progress else ""))

    def _line(self, text: str) -> None:
        with self._writing:
            self._stream.write(text + "\n")
            self._stream.flush()


STAGE_WIDTH = 12  # characters, so that the bars stay in place when stages come and go
RECENT_STEPS = 10  # from which the remaining time is estimated


class BarConsole(StageListener):
    """A bar for the steps and one for each running stage; printed lines scroll above them."""

    def __init__(self, terminal: Console, *, total_steps: int, first_step: int = 0) -> None:
        self._terminal, self._total_steps = terminal, total_steps
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds of the last steps
        self._columns: tuple[Shown, ...] = ()
        self._stages: dict[int, TaskID] = {}  # by id of the running stage
        name, detail = TextColumn(f"{{task.description:<{STAGE_WIDTH}}}"), TextColumn("{task.fields[detail]}")
        columns = SpinnerColumn(), name, BarColumn(bar_width=30), detail, TimeElapsedColumn()
        self._progress = Progress(*columns, console=terminal, transient=True)
        done = f"{first_step}/{total_steps}"
        self._steps = self._progress.add_task("steps", total=total_steps, completed=first_step, detail=done)
        self._progress.start()

    def stage_started(self, stage: Stage) -> None:
        self._stages[id(stage)] = self._progress.add_task(stage.name, total=stage.total, detail="")

    def stage_advanced(self, stage: Stage) -> None:
        self._progress.update(self._stages[id(stage)], completed=stage.done, detail=stage.progress)

    def stage_finished(self, stage: Stage) -> None:
        self._progress.remove_task(self._stages.pop(id(stage)))

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        if step > 0:
            self._recent.append(seconds)
        left = (self._total_steps - step) * sum(self._recent) / max(len(self._recent), 1)
        estimate = f", {format_seconds(left)} left" if left else ""
        self._progress.update(self._steps, completed=step, detail=f"{step}/{self._total_steps}{estimate}")

    def header(self, facts: Mapping[str, str]) -> None:
        grid = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            grid.add_row(Text(name, style="bold"), Text(value))
        self._terminal.print(grid)

    def step(self, metrics: StepMetrics) -> None:
        values = metrics.values
        width = 2 * len(str(self._total_steps)) + 3
        label = f"{f'{metrics.step}/{self._total_steps}':>{width}}"
        columns = self._columns or choose_columns(values, self._terminal.width - width)
        # Line 0 of a run holds a validation only: the columns come with the first step that has metrics.
        if not self._columns and any(column.prefix != "time/step" for column in columns):
            self._columns = columns
            self._print(f"{'step':>{width}}" + "".join(f"{c.column:>{c.width}}" for c in columns), "bold")
        if any(column.prefix in values for column in self._columns if column.prefix != "time/step"):
            shown = {key: format_number(value, 3) for key, value in values.items()}
            cells = (f"{shown.get(column.prefix, '-'):>{column.width}}" for column in self._columns)
            self._print(label + "".join(cells))
        if lost := describe_losses(values):
            self._print(f"{label}  lost: {', '.join(lost)}", "yellow")
        if validation := describe_validation(values):
            self._print(f"{label}  validation: {', '.join(validation)}", "cyan")

    def summary(self, changes: Sequence[Change], report: Path | None) -> None:
        self._progress.stop()
        table = Table("metric")
        for name in ("before", "after", "change"):
            table.add_column(name, justify="right")
        for change in changes:
            before, after = change.before, change.after
            difference = None if before is None or after is None else after - before
            cells = ["-" if value is None else format_number(value) for value in (before, after, difference)]
            sign = "+" if difference is not None and difference > 0 else ""
            table.add_row(escape(change.metric), *cells[:2], sign + cells[2])
        if changes:
            self._terminal.print(table)
        if report is not None:
            self._print(f"report: {report}", "bold")

    def logging_handler(self) -> logging.Handler:
        return RichHandler(console=self._terminal, show_path=False, markup=False, log_time_format="%X")

    def close(self) -> None:
        self._progress.stop()

    def _print(self, line: str, style: str = "") -> None:
        self._terminal.print(Text(line, style=style), soft_wrap=True, highlight=False)


def open_console(
    config: LoggerConfig, *, total_steps: int, first_step: int = 0, stream: TextIO | None = None
) -> PlainConsole | BarConsole:
    stream = stream or sys.stdout
    terminal = Console(file=stream, emoji=False)
    has_bars = terminal.is_terminal and not terminal.is_dumb_terminal
    if config.console == "rich" or (config.console == "auto" and has_bars):
        return BarConsole(terminal, total_steps=total_steps, first_step=first_step)
    return PlainConsole(stream, total_steps=total_steps)
