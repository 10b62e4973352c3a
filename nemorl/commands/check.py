"""`nemorl check`: whether experiments would start."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nemorl.commands.exit_codes import ExitCode
from nemorl.commands.preflight import prepare
from nemorl.commands.terminal import complain, notes, plan_table, say
from nemorl.errors import ConfigError
from nemorl.plan.machine import read_machine

HELP = "say whether experiments would start, and list all that speaks against it"


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("configs", type=Path, nargs="+", metavar="CONFIG", help="experiment files (YAML)")


def run(arguments: Namespace) -> int:
    """Every file is looked at, also after one that is refused."""
    machine = read_machine()
    refused = 0
    for path in arguments.configs:
        try:
            ready = prepare(path, (), machine)
        except ConfigError as error:
            complain(str(error))
            refused += 1
            continue
        say(f"{path} is sound")
        notes().print(plan_table(ready.plan))
    return ExitCode.REFUSED if refused else ExitCode.WELL
