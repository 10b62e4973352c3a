"""The experiment file of an imported config, and its check before it is written."""

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.config.yaml import VARIANT_KEYS, leaves
from nemorl.errors import ConfigError, Problem, UsageError

from . import nemo_rl, openrlhf, trl, trl_offline, verl
from .outcome import settled
from .rules import CannotImport, Imported, Options, Origin, Rule, apply
from .sources import read_text
from .trl_trainers import IMPORTED, trainer_of

_WIDTH = 2**31  # no line is broken
_ORDER = tuple(Experiment.model_fields)
_NAMED = 6  # keys of the origin in a comment


@dataclass(frozen=True)
class Project:
    title: str
    read: Callable[[Path], Mapping[str, Any]]
    """Read a file as the project does, into a tree. Raises CannotImport."""
    rules: tuple[Rule, ...]
    run_dir: str  # where the config names none
    marks: str  # what only its files have, as a regular expression
    likenesses: Mapping[str, object]  # values, or all values, by which types of keys are checked
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that a config need not have
    trainers: Mapping[str, "Project"] = field(default_factory=dict)
    """The same with the rules of each trainer, where a config does not have all trainers' keys."""


_TRL = {
    "grpo": Project("TRL", trl.read, trl.RULES, "runs/trl", trl.MARKS, trl.LIKENESSES, trl.DEFAULTS),
    **{
        kind: Project(
            "TRL",
            trl.read,
            trl_offline.rules_of(kind),
            "runs/trl",
            trl.MARKS,
            trl_offline.LIKENESSES,
            trl_offline.DEFAULTS[kind],
        )
        for kind in IMPORTED
        if kind in trl_offline.DEFAULTS
    },
}
PROJECTS = {
    "nemo-rl": Project(
        "NeMo-RL", nemo_rl.read, nemo_rl.RULES, "runs/nemo-rl", nemo_rl.MARKS, nemo_rl.LIKENESSES
    ),
    "verl": Project("verl", verl.read, verl.RULES, "runs/verl", verl.MARKS, verl.LIKENESSES, verl.DEFAULTS),
    "openrlhf": Project(
        "OpenRLHF",
        openrlhf.read,
        openrlhf.RULES,
        "runs/openrlhf",
        openrlhf.MARKS,
        openrlhf.LIKENESSES,
        openrlhf.DEFAULTS,
    ),
    "trl": replace(_TRL["grpo"], trainers=_TRL),
}
_OURS = r"^  model_path:"
_UNSET = re.compile(r"\$\{?([A-Za-z_]\w*)")  # a variable of a shell


def project_of(text: str) -> Project | None:
    """The project of a file with this text; null if it may be of none or of several."""
    found = [one for one in PROJECTS.values() if re.search(one.marks, text, re.MULTILINE)]
    return found[0] if len(found) == 1 else None


def import_values(
    project: Project, values: Mapping[str, Any], options: Options | None = None, *, compares: bool = False
) -> Imported:
    """Apply a project's rules to the values of a config by their dotted keys. Raises CannotImport.

    `compares`: rows name the fields that differ with the value of their key (`settled`), not all of the
    rule. This may take a second.
    """
    options = options or Options()
    if not values:
        raise CannotImport(f"the file has no keys; name a config of {project.title}")
    if project.trainers:
        project = project.trainers[trainer_of(values, options.trainer)]
    elif options.trainer:
        raise CannotImport(f"--trainer {options.trainer}: {project.title}'s configs name theirs; remove it")
    origin = Origin(values, options, project.defaults)
    imported = apply(project.rules, origin, likenesses=project.likenesses)
    if compares:
        imported = settled(imported, project.rules, origin)
    tree = {"run_dir": project.run_dir, **imported.tree}
    for _, value in leaves(tree):
        if not isinstance(value, str) or value in origin.comments or len(value.split()) > 1:
            continue
        if unset := _UNSET.search(value):
            origin.note(value, f"nothing sets ${unset[1]}; write the value")
    ordered = {name: _variant_first(tree[name]) for name in _ORDER if name in tree}
    return replace(imported, tree=ordered)


def _variant_first(section: Any) -> Any:
    """The same section with the field that selects its variant, such as `name`, in front."""
    if not isinstance(section, dict):
        return section
    keys = sorted(section, key=lambda key: key not in VARIANT_KEYS)
    return {key: _variant_first(section[key]) for key in keys}


def import_file(
    project: Project,
    file: Path,
    rows: int | None = None,
    template: Path | None = None,
    trainer: str | None = None,
) -> Imported:
    """The same of a file.

    `rows`: of the training data, for runs whose length is given in epochs. `template`: file for a chat
    template that the config has as text. `trainer`: which of TRL's a config is for, if its keys fit several.
    """
    _require_origin(project, file)
    options = Options(rows, str(file.parent), None if template is None else str(template), trainer)
    try:
        return import_values(project, dict(leaves(project.read(file))), options, compares=True)
    except CannotImport as error:
        problems = [problem.removeprefix(f"{file}: ") for problem in error.problems]
        if len(problems) == 1:
            has_file = problems[0].startswith(f"{file}:")  # with a line
            raise CannotImport(problems[0] if has_file else f"{file}: {problems[0]}") from error
        raise CannotImport(f"{file}: {len(problems)} problems", *(f"  {one}" for one in problems)) from error


def _require_origin(project: Project, file: Path) -> None:
    text = read_text(file)
    found = project_of(text)
    if found is not None and found is not project:
        (name,) = [name for name, one in PROJECTS.items() if one is found]
        raise CannotImport(f"{file}: this is a config of {found.title}; use --from {name}")
    if found is None and re.search(_OURS, text, re.MULTILINE):
        raise CannotImport(f"{file}: this is an experiment of nemorl already; run `nemorl check {file}`")


def to_text(imported: Imported, project: Project, source: str) -> str:
    """The experiment as YAML, with the keys that each section comes from."""
    parts = [f"# Imported from {project.title}: {source}\n"]
    for name, section in imported.tree.items():
        keys = imported.sources.get(name, [])
        shown = ", ".join(keys[:_NAMED]) + (f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "")
        if shown:
            parts.append(f"# From {shown}\n")
        dumped = yaml.safe_dump({name: section}, sort_keys=False, allow_unicode=True, width=_WIDTH)
        parts += [_commented(line, imported.comments) for line in dumped.splitlines()]
    return "".join(parts)


def _commented(line: str, comments: Mapping[str, str]) -> str:
    """A line with the comment on its value, if there is one."""
    value = line.partition(": ")[2]
    return f"{line}  # {comments[value]}\n" if value in comments else f"{line}\n"


def checked(
    text: str, folder: Path, source: Path | None = None, imported: Imported | None = None
) -> Experiment:
    """Load an experiment from its text, by a file in a folder.

    Raises ConfigError with all problems, as `nemorl check` has them, of what was imported from `source`; the
    origin of each is the keys that its field comes from.
    """
    try:
        handle, name = tempfile.mkstemp(suffix=".yaml", prefix="imported-", dir=folder)
    except OSError as error:
        problem = f"{folder}: nothing can be written here: {error.strerror}"
        raise UsageError(f"{problem}; name a file in another folder with -o") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        return load_experiment(Path(name))
    except ConfigError as error:
        problems = [replace(problem, origin=_keys_of(problem, imported)) for problem in error.problems]
        raise ConfigError(f"{source or 'the config'}, imported", problems) from error
    finally:
        os.unlink(name)


def _is_within(path: str, section: str) -> bool:
    return f"{path}.".startswith(f"{section}.")


def _keys_of(problem: Problem, imported: Imported | None) -> str:
    """The keys of the origin that a field comes from; those with its name or value, if there are some."""
    if imported is None:
        return ""
    given = [
        row for row in imported.rows if any(_is_within(problem.field, field) for field in row.fields)
    ] or [row for row in imported.rows if any(_is_within(field, problem.field) for field in row.fields)]
    value = str(problem.value)  # as NaN is not equal to itself
    same = [row for row in given if problem.value is not None and str(row.value) == value]
    named = [row for row in given if row.key.rpartition(".")[2] in problem.field.split(".")]
    keys = [row.key for row in [row for row in named if row in same] or named or same or given][:_NAMED]
    if keys:
        return f"from {', '.join(keys)}"
    absent = imported.keys_of_fields.get(problem.field, ())[:_NAMED]
    return f"from {' or '.join(absent)}, which is not given" if absent else ""
