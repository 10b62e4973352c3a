"""`nemorl config`: every field of an experiment file, with its type, default and help.

By sections and wrapped on a terminal; a line for each field where the output goes elsewhere.
"""

import difflib
import json
from argparse import ArgumentParser, Namespace
from textwrap import fill

from rich.text import Text

from nemorl.commands.terminal import output, say
from nemorl.config.schema import FieldHelp, describe, section_help
from nemorl.errors import ABSENT, NemorlError

HELP = "show the fields of an experiment file"
_WIDEST = 100  # columns that are easily read


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "section", nargs="?", default="", help="only the fields below it, such as `policy.optimizer`"
    )


def run(arguments: Namespace) -> int:
    """Raises NemorlError for an unknown section."""
    fields = describe(arguments.section)
    if not fields:
        raise NemorlError(_unknown_section(arguments.section))
    if output().is_terminal:
        _print_sections(fields)
    else:  # a line each, for grep
        for field in fields:
            say(f"{_head(field, field.path)}. {field.help}".strip())
    return 0


def _print_sections(fields: list[FieldHelp]) -> None:
    """Each section with its fields under it."""
    sections: dict[str, list[FieldHelp]] = {}
    for field in fields:
        sections.setdefault(field.path.rpartition(".")[0], []).append(field)
    for number, (section, members) in enumerate(sections.items()):
        if number:
            say("")
        if section:
            _print(section, "", "bold underline")
        _print(section_help(section), "")
        for field in members:
            _print(_head(field, field.path.rpartition(".")[2]), "  ", "bold")
            _print(field.help, "      ")


def _print(text: str, indent: str, style: str = "") -> None:
    """Print a paragraph; continuation lines of a heading are indented by two more."""
    console = output()
    if text:
        width = min(console.width, _WIDEST)
        further = indent + ("  " if style else "")
        # Names with hyphens and commands are not broken.
        lines = fill(text, width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)
        console.print(Text(lines, style=style))


def _head(field: FieldHelp, name: str) -> str:
    variant = f" [{field.variant}]" if field.variant else ""
    default = "required" if field.default is ABSENT else f"default {_yaml(field.default)}"
    return f"{name}{variant}: {field.type}, {default}"


def _yaml(default: object) -> str:
    """As in a file: strings without quotes, unless they are empty."""
    return default if isinstance(default, str) and default else json.dumps(default, default=str)


def _unknown_section(asked: str) -> str:
    known = sorted({field.path.rpartition(".")[0] or field.path for field in describe()})
    close = difflib.get_close_matches(asked, known, n=1)
    fix = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}"
    return f"unknown section `{asked}`; {fix}"
