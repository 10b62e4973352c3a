"""Output, arguments and exit codes of commands. Results go to standard output, all else to standard error."""

import difflib
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _SubParsersAction
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from nemorl.config.schema import describe
from nemorl.plan.memory import MEMORY_PARTS
from nemorl.plan.problems import Plan

Commands: TypeAlias = "_SubParsersAction[ArgumentParser]"
WIDE = 100_000  # columns, where the output is not a terminal
EXPERIMENT_HELP = "experiment file (YAML), or a name of `nemorl recipes list` such as quickstart/grpo"


class ExitCode(IntEnum):
    WELL = 0
    FAILED = 1  # a run or a command began and failed
    REFUSED = 2  # a configuration or an argument is wrong; nothing was started
    STOPPED = 75  # stopped by a signal, can continue with --resume; sysexits' EX_TEMPFAIL
    INTERRUPTED = 130  # Ctrl-C, as shells count it


def add_command(
    commands: Commands, name: str, action: Callable[[Namespace], int], help_text: str
) -> ArgumentParser:
    """Add a command that runs `action`, which returns the exit status or raises `NemorlError`."""
    parser = commands.add_parser(name, help=help_text, description=help_text)
    parser.set_defaults(action=action)
    return parser


def add_group(commands: Commands, name: str, help_text: str) -> Commands:
    parser = commands.add_parser(name, help=help_text, description=help_text)
    return parser.add_subparsers(metavar="COMMAND", required=True)


def add_experiment(parser: ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help=EXPERIMENT_HELP)
    add_overrides(parser)


def add_overrides(parser: ArgumentParser) -> None:
    help_text = "set a field of the experiment; the value is YAML, such as 1e-6, null or [1, 2]"
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b=value", help=help_text)


def field_hint(option: str) -> str:
    """How to set the field that an option such as `--seed` seems to name, if there is one."""
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    by_name: dict[str, str] = {}  # the first field of each name outside of lists, and all by their paths
    for field in describe():
        if ".0." not in field.path:
            by_name.setdefault(field.path.rpartition(".")[2], field.path)
        by_name[field.path] = field.path
    with_it = sorted((known for known in by_name if known.endswith(f"_{name}")), key=len)  # `--steps`
    close = [name] if name in by_name else with_it or difflib.get_close_matches(name, by_name, n=1)
    return f" (fields are set without dashes, as `{by_name[close[0]]}=value`)" if close else ""


def positive_integer(text: str) -> int:
    return _integer(text, least=1)


def natural_number(text: str) -> int:
    return _integer(text, least=0)


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text!r}: expected an integer of at least {least}")
    return int(text)


def positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text!r}: expected a number above 0")
    return number


def nonnegative_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ArgumentTypeError(f"{text!r}: expected a number of at least 0")
    return number


def output() -> Console:
    """Console for results. Created for each use, so that it follows a redirected stream."""
    return Console(highlight=False, emoji=False, soft_wrap=True)


def notes() -> Console:
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def say(text: str) -> None:
    output().print(text, markup=False)


def show_message(role: str, content: str, remark: str = "") -> None:
    """Print a message of a conversation, its lines next to the role."""
    first, *rest = content.split("\n")
    say("\n".join([f"{role:<10}{first}{remark and f'  [{remark}]'}", *(" " * 10 + line for line in rest)]))


def complain(text: str) -> None:
    notes().print(text, markup=False)


def table(title: str, columns: Sequence[str]) -> Table:
    """An empty table; its cells are `Text`, or `str` without square brackets."""
    result = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        result.add_column(column, overflow="fold")
    return result


def plan_table(plan: Plan) -> Table:
    title = "Memory of one process of each kind in GB (weights exact, the rest estimated)"
    result = table(title, ["", *(f"{process.group} x {process.count}" for process in plan.processes)])
    for column in result.columns[1:]:
        column.justify = "right"
    of_all = [process.total * process.count for process in plan.processes]
    rows = {part.replace("_", " "): [getattr(p, part) for p in plan.processes] for part in MEMORY_PARTS}
    rows = {part: sizes for part, sizes in rows.items() if any(sizes)}
    rows |= {"one process": [process.total for process in plan.processes], "all of them": of_all}
    for name, sizes in rows.items():
        result.add_row(name, *map(_gigabytes, sizes))
    result.caption = f"together {_gigabytes(sum(of_all))} GB"
    result.caption_justify = "left"
    return result


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f}" if count else "-"
