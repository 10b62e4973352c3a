"""The experiment file of an imported config, and its check before it is written."""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.config.yaml import VARIANT_KEYS, leaves
from nemorl.errors import ConfigError

from . import nemo_rl, trl, verl
from .rules import Imported, Options, Origin, Rule, apply

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
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that a config need not have


PROJECTS = {
    "nemo-rl": Project("NeMo-RL", nemo_rl.read, nemo_rl.RULES, "runs/nemo-rl"),
    "verl": Project("verl", verl.read, verl.RULES, "runs/verl", verl.DEFAULTS),
    "trl": Project("TRL", trl.read, trl.RULES, "runs/trl", trl.DEFAULTS),
}


def import_values(project: Project, values: Mapping[str, Any], options: Options | None = None) -> Imported:
    """Apply a project's rules to the values of a config by their dotted keys. Raises CannotImport."""
    imported = apply(project.rules, Origin(values, options, project.defaults))
    tree = {"run_dir": project.run_dir, **imported.tree}
    ordered = {name: _variant_first(tree[name]) for name in _ORDER if name in tree}
    return replace(imported, tree=ordered)


def _variant_first(section: Any) -> Any:
    """The same section with the field that selects its variant, such as `name`, in front."""
    if not isinstance(section, dict):
        return section
    keys = sorted(section, key=lambda key: key not in VARIANT_KEYS)
    return {key: _variant_first(section[key]) for key in keys}


def import_file(
    project: Project, file: Path, rows: int | None = None, template: Path | None = None
) -> Imported:
    """The same of a file.

    `rows`: of the training data, for runs whose length is given in epochs. `template`: file for a chat
    template that the config has as text.
    """
    values = dict(leaves(project.read(file)))
    return import_values(
        project, values, Options(rows, str(file.parent), None if template is None else str(template))
    )


def to_text(imported: Imported, project: Project, source: str) -> str:
    """The experiment as YAML, with the keys that each section comes from."""
    parts = [f"# Imported from {project.title}: {source}\n"]
    for name, section in imported.tree.items():
        keys = imported.sources.get(name, [])
        shown = ", ".join(keys[:_NAMED]) + (f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "")
        if shown:
            parts.append(f"# From {shown}\n")
        parts.append(yaml.safe_dump({name: section}, sort_keys=False, allow_unicode=True, width=_WIDTH))
    return "".join(parts)


def checked(text: str, folder: Path, source: Path | None = None) -> Experiment:
    """Load an experiment from its text, by a file in a folder.

    Raises ConfigError with all problems, as `nemorl check` has them, of what was imported from `source`.
    """
    handle, name = tempfile.mkstemp(suffix=".yaml", prefix="imported-", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        return load_experiment(Path(name))
    except ConfigError as error:
        problems = [replace(problem, origin="") for problem in error.problems]
        raise ConfigError(f"{source or 'the config'}, imported", problems) from error
    finally:
        os.unlink(name)
