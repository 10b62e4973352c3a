"""Output, arguments and exit codes of commands. Results go to standard output, all else to standard error."""

from argparse import ArgumentParser
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nemorl.plan.memory import memory_parts
from nemorl.plan.problems import Plan


def output() -> Console:
    """For results. Created for each use, so that it follows a redirected stream."""
    return Console(highlight=False, soft_wrap=True)


def notes() -> Console:
    """For everything else."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """A result, as it is."""
    output().print(text, markup=False)


def complain(text: str) -> None:
    """A sentence about a failure."""
    notes().print(text, markup=False)


def table(title: str, columns: Sequence[str]) -> Table:
    """An empty table in the one style; cells are added as `Text`, or as `str` without square brackets."""
    result = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        result.add_column(column, overflow="fold")
    return result


def plan_table(plan: Plan) -> Table:
    """Processes and their memory: a column for each kind of process."""
    title = "Memory of one process of each kind in GB (weights exact, the rest estimated)"
    result = table(title, ["", *(f"{process.group} x {process.count}" for process in plan.processes)])
    for column in result.columns[1:]:
        column.justify = "right"
    for part in memory_parts():
        sizes = [getattr(process, part) for process in plan.processes]
        if any(sizes):
            result.add_row(part.replace("_", " "), *map(_gigabytes, sizes))
    result.add_row("one process", *(_gigabytes(process.total) for process in plan.processes))
    result.add_row("all of them", *(_gigabytes(process.total * process.count) for process in plan.processes))
    everything = sum(process.total * process.count for process in plan.processes)
    result.caption = f"together {_gigabytes(everything)} GB"
    result.caption_justify = "left"
    return result


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f}" if count else "-"


RESUME = "continue from the newest complete checkpoint of the run folder"


def add_experiment(parser: ArgumentParser) -> None:
    """CONFIG and its overrides."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="experiment file (YAML)")
    add_overrides(parser)


def add_overrides(parser: ArgumentParser) -> None:
    """The overrides of an experiment."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="a.b=value",
        help="set a field of the experiment; the value is YAML, such as 1e-6, null or [1, 2]",
    )


class ExitCode(IntEnum):
    """As shells and schedulers see it."""

    WELL = 0
    FAILED = 1  # a run or a command began and failed
    REFUSED = 2  # a configuration or an argument is wrong; nothing was started
    STOPPED = 75  # stopped by a signal, can continue with --resume; sysexits' EX_TEMPFAIL
    INTERRUPTED = 130  # Ctrl-C, as shells count it
