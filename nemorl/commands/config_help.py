"""`nemorl config`: every field of an experiment file, with its type, default and help."""

import difflib
import json
from argparse import ArgumentParser, Namespace

from rich.text import Text

from nemorl.commands.terminal import output, table
from nemorl.config.schema import FieldHelp, describe
from nemorl.errors import ABSENT, NemorlError

HELP = "show the fields of an experiment file"


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
    rows = table("", ["field", "type", "default", "meaning"])
    rows.columns[0].no_wrap = True
    for field in fields:
        rows.add_row(Text(_name(field)), Text(field.type), Text(_default(field)), Text(field.help))
    output().print(rows, soft_wrap=False)
    return 0


def _name(field: FieldHelp) -> str:
    return f"{field.path} [{field.variant}]" if field.variant else field.path


def _default(field: FieldHelp) -> str:
    return "required" if field.default is ABSENT else json.dumps(field.default, default=str)


def _unknown_section(asked: str) -> str:
    known = sorted({field.path.rpartition(".")[0] or field.path for field in describe()})
    close = difflib.get_close_matches(asked, known, n=1)
    mend = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}"
    return f"an experiment has no section `{asked}`: {mend}"
