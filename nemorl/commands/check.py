"""`nemorl check`: whether experiments would start."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nemorl.commands.exit_codes import ExitCode
from nemorl.commands.preflight import prepare
from nemorl.commands.terminal import complain, notes, plan_table, say
from nemorl.config.load import ORIGIN as COMMAND_LINE
from nemorl.errors import ConfigError, NemorlError
from nemorl.plan.machine import read_machine

HELP = "say whether experiments would start, and list all that speaks against it"


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="CONFIG|a.b=value",
        help="experiment files (YAML), and fields that are set in each of them before it is looked at",
    )


def run(arguments: Namespace) -> int:
    """Every file is looked at, also after one that is refused. Raises NemorlError where there is none."""
    overrides = [word for word in arguments.words if "=" in word and not Path(word).exists()]
    paths = [Path(word) for word in arguments.words if word not in overrides]
    if not paths:
        raise NemorlError(f"{', '.join(overrides)}: name an experiment file too, in which these are set")
    machine = read_machine()
    refused = 0
    for path in paths:
        try:
            ready = prepare(path, overrides, machine, starts=False)
        except ConfigError as error:
            if error.source == COMMAND_LINE:  # which is the same for every file
                raise
            complain(str(error))
            refused += 1
            continue
        say(f"{path} is sound")
        notes().print(plan_table(ready.plan))
    return ExitCode.REFUSED if refused else ExitCode.WELL
