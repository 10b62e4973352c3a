"""From an experiment file to a checked `Experiment`.

file and its `defaults:`  ->  overrides  ->  types  ->  derived fields  ->  checks
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from pydantic import ValidationError, create_model
from pydantic_core import ErrorDetails

from nemorl.errors import ABSENT, ConfigError, Problem

from . import shipped
from .base import LEVELS, Config, did_you_mean
from .checks import check_sections
from .experiment import Experiment, derived_fields, with_derived_fields
from .schema import common_fields, common_fields_of_named, describe, help_text, locate, names, tag
from .type_errors import expectation
from .yaml import (
    Document,
    FieldPath,
    Tree,
    dotted,
    field_path,
    is_written,
    merged,
    parse_document,
    parse_value,
)

ORIGIN = "command line"
DEFAULT = "default"
DEFAULTS = "defaults"
SUFFIXES = (".yaml", ".yml")  # of experiment files
_MAX_NAMED = 4  # variants in one sentence
_QUOTED = re.compile(r"'([^']*)'")  # the choices, as pydantic lists them: 'a', 'b' or 'c'

# Sections for which null is often written, and how to switch them off.
_SWITCHED_OFF = {
    "generation": "if nothing is sampled, no engine is started",
    "algorithm.validation": "it is off with `period: null, at_start: false, at_end: false`, its defaults",
}


def _problem(details: ErrorDetails) -> Problem:
    location, kind, value = details["loc"], details["type"], details["input"]
    path, sections = locate(location)
    field, context = dotted(path), details.get("ctx", {})
    to_field = location
    while to_field and isinstance(to_field[-1], int):  # an item of a list
        to_field = to_field[:-1]
    name = str(to_field[-1])
    owners = [owner for owner in locate(to_field[:-1])[1] if name in owner.model_fields]
    words = next((help_text(owner, name) for owner in owners), "")
    explained = f": {words}" if words else ""
    known = [variant for section in sections for variant in names(section)]
    has_default = any(not owner.model_fields[name].is_required() for owner in owners)
    match kind:
        case "missing":
            return Problem(field, ABSENT, f"this field is required{explained}")
        case "extra_forbidden":
            return Problem(field, value, _unknown_field(location, path))
        case "union_tag_invalid":
            choice = _describe_choice(str(context["tag"]), known)
            return Problem(f"{field}.{tag(sections[0])}", context["tag"], choice)
        case "union_tag_not_found":
            fix = f"this field is required; use one of {_listed(known)}"
            return Problem(f"{field}.{tag(sections[0])}", ABSENT, fix)
        case "literal_error":
            return Problem(field, value, _describe_choice(str(value), _QUOTED.findall(context["expected"])))
        case "string_pattern_mismatch" if location[-1] == "[key]":
            fix = "invalid name; use small letters, digits and _, starting with a letter, such as `sums_2`"
            return Problem(dotted(path[:-2]), value, fix)
        case _ if value is None and kind.startswith("model") and has_default:
            off = f"; {_SWITCHED_OFF[field]}" if field in _SWITCHED_OFF else ""
            fix = f"a section cannot be null; remove it to use its defaults{off}{explained}"
            return Problem(field, value, fix)
        case _:
            return Problem(field, value, expectation(details) + explained)


def _describe_choice(given: str, known: list[str]) -> str:
    return f"unknown value; {did_you_mean(given, known)}expected one of {_listed(known)}"


def _unknown_field(location: tuple[str | int, ...], path: FieldPath) -> str:
    name = str(path[-1])
    _, owners = locate(location[:-1])
    for owner in owners:
        if name in owner.replaced_fields:
            return f"unknown field; set {owner.replaced_fields[name]}"
    # The variants from which one was selected, whose name is the last step but one of the location.
    named = len(location) > 1 and any(location[-2] in names(owner) for owner in owners)
    around = locate(location[:-2])[1] if named else ()
    others = [section for section in around if name in section.model_fields]
    if others:
        theirs = [one for section in others for one in names(section)]
        which = f"{_listed(theirs[:_MAX_NAMED])}{' and others' * (len(theirs) > _MAX_NAMED)}"
        choice = dotted((*path[:-1], tag(owners[0])))
        problem = f"this field belongs to {which}, and {choice} is `{location[-2]}`"
        return f"{problem}; remove it, or change {choice}"
    known = sorted({field for owner in owners for field in owner.model_fields})
    levels: dict[str, int] = {}  # of the fields with this name elsewhere, by path
    for one in describe():
        if one.path.rpartition(".")[2] == name and one.path != dotted(path):
            levels[one.path] = min(LEVELS.index(one.level), levels.get(one.path, len(LEVELS)))
    elsewhere = sorted(levels)
    nearby = [place for place in elsewhere if place.startswith(f"{path[0]}.")]
    # Of several, those that more experiments set: not `policy.draft.lr` for `policy.lr`.
    nearby = [place for place in nearby if levels[place] == min(levels[other] for other in nearby)]
    # A longer name in this section or in another variant of it: `url` for `base_url`.
    longer = {
        field for section in (*owners, *around) for field in section.model_fields if name in field.split("_")
    }
    siblings = [dotted((*path[:-1], field)) for field in sorted(longer)]
    elsewhere = (nearby or siblings or elsewhere)[:_MAX_NAMED]
    suggestion = f"did you mean {_listed(elsewhere)}? " if elsewhere else did_you_mean(name, known)
    return f"unknown field; {suggestion or f'the fields here are {_listed(known)}'}".rstrip()


def _listed(items: Iterable[str]) -> str:
    return ", ".join(f"`{item}`" for item in items)


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Lay `a.b=value` pairs over a document; of two for one field the later wins.

    The value is YAML; a number in the path is an index of a list. All pairs together are one layer, so their
    order does not matter if one of them changes the variant of a section. Raises `ConfigError`.
    """
    layer: Tree = {}
    origins: dict[FieldPath, str] = {}
    for override in overrides:
        field, value = _parsed(override)
        *around, last = field.split(".")
        section: Tree = {last: value}
        for key in reversed(around):
            section = {key: section}
        layer = merged(layer, section, common_fields_of_named)
        path = field_path(field)  # with the sections around it that no file has
        new = {path[:end] for end in range(1, len(path))} - document.origins.keys()
        origins |= dict.fromkeys((*new, *_paths(path, value)), ORIGIN)
    _refuse_unknown_indexes(document.tree, layer, ())
    tree = merged(document.tree, layer, common_fields)
    return Document(tree, document.origins | origins, document.problems)


def _parsed(override: str) -> tuple[str, object]:
    field, equals, text = override.partition("=")
    field = field.strip()
    # Other tools write `+a/b`, `--a.b` and `a[0].b`.
    plain = re.sub(r"\[(\d+)\]", r".\1", field).replace("/", ".").lstrip("+-~")
    if not equals or not all(field.split(".")):
        fix = "expected `section.field=value` without spaces around `=`, such as `algorithm.num_steps=20`"
        if override.endswith(SUFFIXES):
            fix = "one experiment file is read, and it comes first; name others under `defaults:` in it"
    elif plain != field:
        fix = f"fields are separated by dots, also indexes of lists; write `{plain}={text}`"
    else:
        return field, parse_value(text, f"{ORIGIN}, {field}", field_path(field))
    raise ConfigError(ORIGIN, [Problem("", override, fix, ORIGIN)])


def _paths(path: FieldPath, value: object) -> Iterator[FieldPath]:
    yield path
    members = dict(enumerate(value)) if isinstance(value, list) else value
    if isinstance(members, dict):
        for key, below in members.items():
            yield from _paths((*path, key), below)


def _refuse_unknown_indexes(base: object, over: object, path: FieldPath) -> None:
    """An index that a list does not have would turn the list into a mapping."""
    if not isinstance(over, dict):
        return
    for key, value in over.items():
        if isinstance(base, list) and not (key.isdecimal() and int(key) < len(base)):
            indexes = f"items 0 to {len(base) - 1}" if base else "no items"
            fix = f"the list has {indexes}; use one of them, or set the complete list as `[...]`"
            raise ConfigError(ORIGIN, [Problem(dotted((*path, key)), value, fix, ORIGIN)])
        if isinstance(base, list):
            _refuse_unknown_indexes(base[int(key)], value, (*path, int(key)))
        elif isinstance(base, dict):
            _refuse_unknown_indexes(base.get(key), value, (*path, key))


def read_document(file: Path, heirs: tuple[Path, ...] = (), text: str | None = None) -> Document:
    """A file with everything it inherits; `heirs` are the files that led to it, the requested one first.

    `text` is read in place of the file's. `defaults:` are read depth-first; later ones win over earlier ones,
    and the file itself over all. Raises `ConfigError`: a file that is missing or unreadable, invalid YAML,
    circular inheritance.
    """
    own = parse_document(_text(file, heirs) if text is None else text, str(file))
    named = own.tree.pop(DEFAULTS, [])
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        fix = "expected a path or a list of paths, relative to this file"
        raise ConfigError(str(file), [Problem(DEFAULTS, named, fix, own.origins[(DEFAULTS,)])])
    lineage = (*heirs, file)
    documents = []
    for parent in (file.parent / name for name in names):
        if parent.resolve() in {heir.resolve() for heir in lineage}:
            circle = " -> ".join(map(str, (*lineage, parent)))
            fix = f"circular inheritance, {circle}; remove one of the links"
            raise ConfigError(str(lineage[0]), [Problem(DEFAULTS, str(parent), fix, str(file))])
        documents.append(read_document(parent, lineage))
    result = Document({})
    for over in (*documents, own):
        tree = merged(result.tree, over.tree, common_fields)
        result = Document(tree, result.origins | over.origins, result.problems + over.problems)
    return result


def _text(file: Path, heirs: tuple[Path, ...]) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        problem = "no such file"
        if "=" in file.name and not heirs:
            problem += "; the experiment file comes first, and overrides such as this after it"
        elif not heirs and str(file) in {field.path for field in describe()}:
            problem += f"; to set this field, write `{file}=VALUE`"
        elif not heirs:
            experiments = sorted(other.name for other in file.parent.glob("*.y*ml"))
            fix = f"{did_you_mean(file.name, experiments)}correct the path of the experiment file"
            problem += f"; {fix if file.suffix in SUFFIXES else shipped.nearest(str(file))}"
    except UnicodeDecodeError as error:
        problem = f"the file is not UTF-8 text: {error.reason} at byte {error.start}"
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}"
    if not heirs:
        raise ConfigError(str(file), [Problem("", str(file), problem, str(file))])
    fix = f"{problem}; `{DEFAULTS}` of {heirs[-1]} names it"
    raise ConfigError(str(heirs[0]), [Problem(DEFAULTS, str(file), fix, str(file))])


@dataclass(frozen=True)
class Loaded:
    """An experiment file as far as it is valid."""

    document: Document  # with what it inherits, and overrides
    sections: Mapping[str, object]  # the valid ones, with derived fields
    experiment: Experiment | None  # None where a type is wrong
    problems: tuple[Problem, ...]  # with their lines


def examine(
    path: Path,
    overrides: Sequence[str] = (),
    further_checks: Callable[[Experiment], Iterable[Problem]] | None = None,
    *,
    text: str | None = None,
    training: bool = True,
) -> Loaded:
    """Read and check an experiment file as `load_experiment` does, and list its problems.

    `text` is checked in place of the file's; of an experiment that only samples, without `training`, what
    only training cannot do is no problem. Raises `ConfigError` only for what cannot be read.
    """
    document = apply_overrides(read_document(shipped.locate(path), text=text), overrides)
    problems = list(document.problems)
    experiment: Experiment | None = None
    try:
        experiment = Experiment.model_validate(document.tree)
    except ValidationError as error:
        known = {problem.field for problem in problems}
        found = map(_problem, error.errors(include_url=False))
        problems += [problem for problem in found if problem.field not in known]
    if experiment and not problems:
        sections = with_derived_fields(dict(experiment))
        experiment = experiment.model_copy(update=sections)
        problems += further_checks(experiment) if further_checks else ()
    else:
        invalid = {problem.field.partition(".")[0] for problem in problems}
        sections = with_derived_fields(_valid_sections(document.tree, invalid))
    problems += check_sections(sections, training=training)
    located = tuple(with_origin(problem, document) for problem in problems)
    return Loaded(document, sections, experiment, located)


def load_experiment(
    path: Path,
    overrides: Sequence[str] = (),
    further_checks: Callable[[Experiment], Iterable[Problem]] | None = None,
) -> Experiment:
    """Read and check an experiment file, with `a.b=value` overrides from the command line.

    `path` may also be the name of a shipped experiment, such as `quickstart/grpo`. Raises `ConfigError` with
    all problems at once; `further_checks`, of model and machine, need valid types.
    """
    loaded = examine(path, overrides, further_checks)
    if loaded.problems or loaded.experiment is None:
        raise ConfigError(str(path), loaded.problems)
    return loaded.experiment


class _Dumper(yaml.SafeDumper):
    """Quotes strings with characters that the reader takes for the end of a line."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if set(data) & set("\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def to_yaml(experiment: Experiment) -> str:
    """The experiment with its defaults as a file; derived fields have their reason as a comment."""
    tree = experiment.model_dump(mode="json")  # whose types turn paths into strings
    lines = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31).splitlines(True)
    origins = parse_document("".join(lines), "").origins
    for field, reason in derived_fields(dict(experiment)).items():
        index = int(origins[field_path(field)].lstrip(":")) - 1
        lines[index] = f"{lines[index].rstrip()}  # {reason}\n"
    return "".join(lines)


def _valid_sections(tree: Tree, invalid: set[str]) -> dict[str, object]:
    """The sections without problems, so that the checks between them still run."""
    valid = {name: field for name, field in Experiment.model_fields.items() if name not in invalid}
    fields = {name: (field.annotation, field) for name, field in valid.items()}
    partial = create_model("PartialExperiment", __base__=Config, **fields)  # type: ignore[call-overload]
    values = partial.model_validate({name: tree[name] for name in valid if name in tree})
    return {name: getattr(values, name) for name in valid}


def with_origin(problem: Problem, document: Document) -> Problem:
    """Add the line of the field, or of the section around it."""
    if problem.origin or not problem.field:
        return problem
    path = field_path(problem.field)
    if problem.value is not ABSENT and not is_written(document.tree, path):
        return replace(problem, origin=DEFAULT)
    while path and not (path in document.origins and is_written(document.tree, path)):
        path = path[:-1]
    return replace(problem, origin=document.origins.get(path, ""))
