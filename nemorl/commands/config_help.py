"""`nemorl config`: every field of an experiment file, with its type, default and help.

Wrapped to the terminal; a line for each field where the output goes elsewhere.
"""

import difflib
import json
from argparse import ArgumentParser, Namespace
from textwrap import fill

from rich.text import Text

from nemorl.commands.terminal import output, say
from nemorl.config.schema import FieldHelp, describe
from nemorl.errors import ABSENT, NemorlError

HELP = "show the fields of an experiment file"
_WIDEST = 100  # columns that are easily read


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "section", nargs="?", default="", help="only the fields below it, such as `policy.optimizer`"
    )


def run(arguments: Namespace) -> int:
    """Raises NemorlError for a section that is not there."""
    fields = describe(arguments.section)
    if not fields:
        raise NemorlError(_unknown_section(arguments.section))
    shown = output()
    for field in fields:
        head = f"{_name(field)}: {field.type}, {_default(field)}"
        if not shown.is_terminal:  # a line each, for grep
            say(f"{head}. {field.help}".strip())
            continue
        width = min(shown.width, _WIDEST)
        shown.print(Text(fill(head, width, subsequent_indent="  "), style="bold"))
        if field.help:
            shown.print(Text(fill(field.help, width, initial_indent="    ", subsequent_indent="    ")))
    return 0


def _name(field: FieldHelp) -> str:
    return f"{field.path} [{field.variant}]" if field.variant else field.path


def _default(field: FieldHelp) -> str:
    if field.default is ABSENT:
        return "required"
    return f"default {json.dumps(field.default, default=str)}"


def _unknown_section(asked: str) -> str:
    known = sorted({field.path.rpartition(".")[0] or field.path for field in describe()})
    close = difflib.get_close_matches(asked, known, n=1)
    mend = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}"
    return f"an experiment has no section `{asked}`: {mend}"
