"""`nemorl recipes`: list, show and copy the experiment files that come with nemorl."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from nemorl.config import shipped
from nemorl.config.load import SUFFIXES
from nemorl.errors import UsageError

from .terminal import WIDE, Commands, ExitCode, add_command, add_group, notes, output, say, table

_DESCRIPTION_COLUMNS = 60  # at least, on a terminal


def register(commands: Commands) -> None:
    group = add_group(commands, "recipes", "list, show and copy the experiments that come with nemorl")
    listing = add_command(group, "list", _list, "list the experiments, with what they require before a run")
    pattern_help = (
        "show only those with this text in name, algorithm or model, or with a name like algorithms/*"
    )
    listing.add_argument("pattern", nargs="?", default="", metavar="PATTERN", help=pattern_help)
    listing.add_argument("--json", action="store_true", help="print JSON instead")
    _add_name(add_command(group, "show", _show, "print the file of an experiment"))
    copy = add_command(
        group, "copy", _copy, "copy an experiment, with the files that it builds on, to edit it"
    )
    _add_name(copy)
    to_help = "file (.yaml) or folder to write (default: the last part of NAME, in the current folder)"
    copy.add_argument("to", nargs="?", type=Path, default=Path(), metavar="DEST", help=to_help)
    copy.add_argument("--force", action="store_true", help="overwrite files that differ")


def _add_name(command: ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", help="name of an experiment, such as quickstart/grpo")


def _list(arguments: Namespace) -> int:
    found = shipped.recipes(arguments.pattern)
    if arguments.json:
        say(json.dumps([asdict(recipe) for recipe in found], indent=2))
        return ExitCode.WELL
    if not found:
        raise UsageError(
            f"{arguments.pattern}: no experiment contains this; {shipped.nearest(arguments.pattern)}"
        )
    rows = table("", ["name", "algorithm", "model", "devices", "description"])
    for recipe in found:
        rows.add_row(*_fixed_cells(recipe), Text(recipe.description))
    for column in rows.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    console = output()
    # A program that reads the lines gets all of each; a terminal folds what is wider.
    fixed = sum(max(map(len, column)) + 1 for column in zip(*map(_fixed_cells, found), strict=True))
    console.width = max(console.width, fixed + _DESCRIPTION_COLUMNS) if console.is_terminal else WIDE
    console.print(rows, soft_wrap=False)
    _print_needs(found)
    return ExitCode.WELL


def _fixed_cells(recipe: shipped.Recipe) -> tuple[str, ...]:
    return recipe.name, recipe.algorithm, recipe.model, recipe.devices


def _print_needs(found: Sequence[shipped.Recipe]) -> None:
    """The commands before a run, each once."""
    commands = {value: command for recipe in found for value, command in recipe.needs.items()}
    if not commands:
        return
    rows = table("What these values require before a run", ["value", "requires"])
    for value, command in commands.items():
        rows.add_row(Text(value), Text(command))
    console = notes()
    console.width = WIDE  # commands in one piece, to copy them
    console.print(rows, soft_wrap=False)


def _show(arguments: Namespace) -> int:
    name = _known(arguments.name)
    say(shipped.file_of(name).read_text(encoding="utf-8").rstrip("\n"))
    if parents := list(dict.fromkeys(shipped.parents(name))):
        notes().print(f"builds on {', '.join(parents)}; `nemorl train {name} --dry-run` shows every value")
    if recipe := shipped.describe(name):
        _print_needs([recipe])
    return ExitCode.WELL


def _copy(arguments: Namespace) -> int:
    name, to = _known(arguments.name), arguments.to
    if to.suffix not in SUFFIXES:
        to /= f"{name.rpartition('/')[2]}.yaml"
    texts = shipped.copies(name, to)
    differ = [path for path, text in texts.items() if path.exists() and not _has(path, text)]
    if differ and not arguments.force:
        exist = ", ".join(map(str, differ))
        raise UsageError(f"{exist}: exists and differs; name another DEST, or overwrite with --force")
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{to} cannot be written ({error.strerror}); name another DEST") from error
    say("\n".join(map(str, reversed(texts))))
    return ExitCode.WELL


def _has(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode("utf-8")


def _known(name: str) -> str:
    if name not in shipped.names():
        raise UsageError(f"{name}: no experiment has this name; {shipped.nearest(name)}")
    return name
