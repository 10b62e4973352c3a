"""What a person sees while a run goes on: bars and a table on a terminal, plain lines elsewhere."""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console as RichConsole

from nemorl.config.run import LoggerConfig

from .metrics import Change, StepMetrics
from .plain_console import PlainConsole
from .rich_console import BarConsole
from .stages import StageListener


class Console(StageListener, Protocol):
    """Shows a run. Stages arrive as to every listener; the rest is called by the observer."""

    def header(self, facts: Mapping[str, str]) -> None:
        """What runs here."""
        ...

    def step(self, metrics: StepMetrics) -> None:
        """The figures of a step that is done."""
        ...

    def summary(self, changes: Sequence[Change], report: Path | None) -> None:
        """What the run achieved."""
        ...

    def logging_handler(self) -> logging.Handler:
        """A handler that writes log lines without tearing the bars."""
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
