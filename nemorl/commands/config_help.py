"""`nemorl config`: every field of an experiment file, with its type, default and help."""

import json
from argparse import Namespace
from textwrap import fill

from rich.text import Text

from nemorl.config.base import LEVELS, suggestion
from nemorl.config.schema import FieldHelp, describe, section_help
from nemorl.errors import ABSENT, UsageError

from .terminal import Commands, ExitCode, add_command, output, say

_WIDEST = 100  # columns that are easily read


def register(commands: Commands) -> None:
    config = add_command(commands, "config", _config, "describe the fields of an experiment file")
    help_text = "show only the fields of this section, such as `policy.optimizer`"
    config.add_argument("section", nargs="?", default="", metavar="SECTION", help=help_text)
    level_help = "show only fields of this level and those below it (default: expert, which are all)"
    config.add_argument("--level", choices=LEVELS, default=LEVELS[-1], help=level_help)


def _config(arguments: Namespace) -> int:
    asked = arguments.section
    if not (fields := describe(asked)):
        known = sorted({field.path.rpartition(".")[0] or field.path for field in describe()})
        raise UsageError(f"unknown section `{asked}`; {suggestion(asked, known)}")
    shown = LEVELS[: LEVELS.index(arguments.level) + 1]
    if not (fields := [field for field in fields if field.level in shown]):
        raise UsageError(f"`{asked}` has no {arguments.level} fields; use a higher --level")
    if not output().is_terminal:  # a line each, for grep
        for field in fields:
            say(f"{_head(field, field.path)}. {field.help}".strip())
        return ExitCode.WELL
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
    return ExitCode.WELL


def _print(text: str, indent: str, style: str = "") -> None:
    """Print a paragraph; continuation lines of a heading are indented by two more."""
    console = output()
    if text:
        width, further = min(console.width, _WIDEST), indent + ("  " if style else "")
        # Names with hyphens and commands are not broken.
        lines = fill(text, width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)
        console.print(Text(lines, style=style))


def _head(field: FieldHelp, name: str) -> str:
    variant = f" [{field.variant}]" if field.variant else ""
    default = "required"
    if isinstance(field.default, str) and field.default:  # as in a file, without quotes
        default = f"default {field.default}"
    elif field.default is not ABSENT:
        default = f"default {json.dumps(field.default, default=str)}"
    return f"{name}{variant}: {field.type}, {default}"
