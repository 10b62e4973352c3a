"""`nemorl import`: an experiment file from the config of another project, with a table of its keys."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table
from rich.text import Text

from nemorl.config.base import counted
from nemorl.errors import ConfigError, UsageError
from nemorl.importing.document import PROJECTS, checked, import_file, to_text
from nemorl.importing.outcome import NO_EFFECT
from nemorl.importing.rules import Imported, Row
from nemorl.importing.trl_trainers import IMPORTED

from .terminal import Commands, ExitCode, add_command, complain, notes, output, positive_integer, say, table

_SHOWN = 60  # characters of a value
_HEADINGS = {
    "unknown": "unknown: no rule knows these keys",
    "lost": "without counterpart, and the result changes",
    "changed": "changed in meaning",
    "mapped": "mapped",
    "unused": "without effect next to the other keys",
    "none": "without counterpart, and the result is the same",
}


def register(commands: Commands) -> None:
    text = "write an experiment file from a config of another project"
    parser = add_command(commands, "import", _import, text)
    parser.description = (
        f"{text}: a YAML file, and of verl, OpenRLHF and TRL also a script with the command line. What "
        "became of each key is printed. The status is 1 if a key is unknown (docs/moving_in.md)."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="config of the other project")
    parser.add_argument("--from", dest="project", choices=list(PROJECTS), required=True, help="the project")
    out_help = "experiment file to write; it must not exist (default: standard output)"
    parser.add_argument("-o", "--out", type=Path, metavar="OUT", help=out_help)
    rows_help = "rows of the training data, for a run whose length is given in epochs"
    parser.add_argument("--rows", type=positive_integer, metavar="N", help=rows_help)
    trainer_help = "trainer of a TRL config whose keys fit several"
    parser.add_argument("--trainer", choices=list(IMPORTED), help=trainer_help)
    parser.add_argument("--all", action="store_true", help="list keys that do not change the result, too")
    parser.add_argument("--json", action="store_true", help="print what became of the keys as JSON instead")


def _import(arguments: Namespace) -> int:
    file, out, project = arguments.file, arguments.out, PROJECTS[arguments.project]
    if file.is_dir():
        inside = [
            path.name for path in sorted(file.iterdir()) if path.suffix in (".yaml", ".yml", ".sh", ".py")
        ]
        named = f", such as {', '.join(inside[:3])}" if inside else ""
        raise UsageError(f"{file} is a folder; name one config of {project.title} in it{named}")
    if not file.is_file():
        raise UsageError(f"{file}: there is no such file; name the config of {project.title}")
    if out is not None and out.exists():
        raise UsageError(f"{out} exists; remove it, or give another name with -o")
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.parent}; create it, or give another name with -o")
    template = None if out is None else out.with_suffix(".jinja")
    imported = import_file(project, file, arguments.rows, template, arguments.trainer)
    if existing := [path for path in imported.files if Path(path).exists()]:
        raise UsageError(f"{existing[0]} exists; remove it, or give another name with -o")
    text = to_text(imported, project, file.name)
    unknown = [row for row in imported.rows if row.outcome == "unknown"]
    try:
        checked(text, Path.cwd() if out is None else out.parent, file, imported)
    except ConfigError:
        for row in unknown:
            complain(f"{row.key}: unknown key; {row.note}")
        raise
    if out is not None:
        out.write_text(text, encoding="utf-8")
        for path, content in imported.files.items():
            Path(path).write_text(content, encoding="utf-8")
    if arguments.json:
        say(json.dumps(as_json(imported), indent=2))
    else:
        console = notes() if out is None else output()
        console.width = max(console.width, 120)
        for part in _tables(imported, arguments.all):
            console.print(part)
        if out is None:
            say(text.rstrip("\n"))
    notes().print(_summary(imported, out), markup=False)
    if unknown:
        names = ", ".join(row.key for row in unknown)
        complain(f"{counted(len(unknown), 'unknown key')}: {names}; check them by hand")
        return ExitCode.FAILED
    return ExitCode.WELL


def as_json(imported: Imported) -> dict[str, object]:
    rows = [
        {
            "key": row.key,
            "value": row.value,
            "outcome": row.outcome,
            "fields": list(row.fields),
            "note": row.note,
            "changes_result": row.changes_result,
        }
        for row in imported.rows
    ]
    return {"experiment": imported.tree, "keys": rows}


def _kind(row: Row) -> str:
    if row.note == NO_EFFECT:
        return "unused"
    return "lost" if row.outcome == "none" and row.changes_result else row.outcome


def _tables(imported: Imported, every: bool) -> Iterator[Table]:
    """One of each outcome; of keys without an effect on the result only if `every` is true."""
    for kind, heading in _HEADINGS.items():
        is_shown = every or kind not in ("unused", "none")
        rows = [row for row in imported.rows if is_shown and _kind(row) == kind]
        if not rows:
            continue
        result = table(f"{heading} ({len(rows)})", ["key", "value", "becomes", "note"])
        for row in rows:
            value = json.dumps(row.value, default=str)
            shown = value if len(value) <= _SHOWN else f"{value[: _SHOWN - 1]}…"
            result.add_row(*map(Text, (row.key, shown, ", ".join(row.fields), row.note)))
        yield result


def _summary(imported: Imported, out: Path | None) -> str:
    lost = imported.count("none", changes_result=True)
    counts = [
        f"{imported.count('mapped')} of {counted(len(imported.rows), 'key')} mapped",
        f"{imported.count('changed')} changed in meaning",
        f"{lost} without counterpart that change the result",
    ]
    written = f"{out} is written; run `nemorl check {out}`. " if out is not None else ""
    replaced = f" Values to replace: {', '.join(imported.comments)}." if imported.comments else ""
    return f"{written}{', '.join(counts)}.{replaced}"
