"""Plain lines, for log files and pipes: one a step, and one when a stage takes long."""

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from .formatting import (
    describe_losses,
    describe_step,
    describe_validation,
    format_number,
    format_progress,
    format_seconds,
)
from .metrics import Change, StepMetrics
from .stages import Stage


class PlainConsole:
    """Writes whole lines. A stage longer than `slow_seconds` is mentioned, then ever less often."""

    def __init__(self, stream: TextIO, *, total_steps: int, slow_seconds: float = 10.0) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._slow_seconds = slow_seconds
        self._timers: dict[int, threading.Timer] = {}  # by id of the running stage
        self._writing = threading.Lock()

    def stage_started(self, stage: Stage) -> None:
        """Set the clock that tells of a long stage."""
        self._mention_later(stage, self._slow_seconds)

    def stage_advanced(self, stage: Stage) -> None:
        """Progress is written only by the clock."""

    def stage_finished(self, stage: Stage) -> None:
        """Stop the clock; a stage that was mentioned gets its end mentioned too."""
        self._timers.pop(id(stage)).cancel()
        if stage.seconds > self._slow_seconds:
            self._line(_describe(stage, f"{stage.outcome} after {format_seconds(stage.seconds)}"))

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        """The step's line comes with its figures."""

    def header(self, facts: Mapping[str, str]) -> None:
        """One fact a line."""
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self._line(f"{name:<{width}}  {value}")

    def step(self, metrics: StepMetrics) -> None:
        """One line of figures, with what was lost at its end, and one for the validation."""
        place = f"step {metrics.step}/{self._total_steps}"
        figures = [text for text in (describe_step(metrics), describe_losses(metrics)) if text]
        if figures:
            self._line(f"{place}: {', '.join(figures)}")
        if validation := describe_validation(metrics):
            self._line(f"{place}, validation: {validation}")

    def summary(self, changes: Sequence[Change], report: Path | None) -> None:
        """One figure a line, then the report's path."""
        for change in changes:
            before, after = _figure(change.before), _figure(change.after)
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


def _figure(value: float | None) -> str:
    return "not measured" if value is None else format_number(value)
