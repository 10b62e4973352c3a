"""From an experiment file to a checked `Experiment`.

file + what it inherits  ->  overrides  ->  ${references}  ->  types  ->  cross-field checks
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from pydantic import ValidationError, create_model

from nemorl.errors import ABSENT, ConfigError, Violation

from .base import Config
from .checks import check_sections
from .experiment import Experiment
from .explain import explain
from .inherit import read_document
from .interpolate import interpolate
from .overrides import apply_overrides
from .yaml import Document, FieldPath, Tree, field_path, look_up

DEFAULT = "default"


def load_experiment(
    path: Path,
    overrides: Sequence[str] = (),
    further_checks: Callable[[Experiment], Iterable[Violation]] | None = None,
) -> Experiment:
    """Read and check an experiment file, with `a.b=value` overrides from the command line.

    Raises `ConfigError` with everything that is wrong at once: what the types refuse, the cross-field checks
    of the sections that are sound, and, where all types are right, what `further_checks` finds outside the
    configuration (see `nemorl.plan.problems`), of which nothing is looked at here.
    """
    document, violations = interpolate(apply_overrides(read_document(path), overrides))
    experiment, refused = _typed(document.tree)
    unresolved = {violation.field for violation in violations}
    violations += [violation for violation in refused if violation.field not in unresolved]
    if experiment and not violations:
        sections = {name: getattr(experiment, name) for name in Experiment.model_fields}
        violations += further_checks(experiment) if further_checks else ()
    else:
        sections = _sound_sections(document.tree, {_section(violation) for violation in violations})
    violations += check_sections(sections)
    if violations or experiment is None:
        raise ConfigError(str(path), [_with_origin(violation, document) for violation in violations])
    return experiment


class _Dumper(yaml.SafeDumper):
    """One that quotes what it would take for the end of a line when it reads it again."""


def _quoted_where_broken(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    breaks = any(character in text for character in "\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if breaks else None)


_Dumper.add_representer(str, _quoted_where_broken)


def to_yaml(experiment: Experiment) -> str:
    """The whole experiment, defaults included, as a file that `load_experiment` reads back."""
    # JSON's types turn paths into texts; a literal `${` must not be taken for a reference.
    tree = experiment.model_dump(mode="json")
    text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)
    return text.replace("${", "$${")


def _typed(tree: Tree) -> tuple[Experiment | None, list[Violation]]:
    try:
        return Experiment.model_validate(tree), []
    except ValidationError as error:
        return None, explain(error)


def _sound_sections(tree: Tree, broken: set[str]) -> dict[str, object]:
    """The sections in which nothing is wrong, so that the checks between them can still be made."""
    sound = {name: field for name, field in Experiment.model_fields.items() if name not in broken}
    fields = {name: (field.annotation, field) for name, field in sound.items()}
    partial = create_model("PartialExperiment", __base__=Config, **fields)  # type: ignore[call-overload]
    values = partial.model_validate({name: tree[name] for name in sound if name in tree})
    return {name: getattr(values, name) for name in sound}


def _section(violation: Violation) -> str:
    return violation.field.partition(".")[0]


def _with_origin(violation: Violation, document: Document) -> Violation:
    """Say where the value was written: the line of the field, or of the section around it."""
    if violation.origin or not violation.field:
        return violation
    path = field_path(violation.field)
    if violation.value is not ABSENT and not _is_written(document.tree, path):
        return replace(violation, origin=DEFAULT)
    while path and not (path in document.origins and _is_written(document.tree, path)):
        path = path[:-1]
    return replace(violation, origin=document.origins.get(path, ""))


def _is_written(tree: Tree, path: FieldPath) -> bool:
    try:
        look_up(tree, path)
    except LookupError:
        return False
    return True
