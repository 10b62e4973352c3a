"""From an experiment file to a checked `Experiment`.

file and its `defaults:`  ->  overrides  ->  types  ->  derived fields  ->  checks
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from pydantic import ValidationError, create_model
from pydantic_core import ErrorDetails

from nemorl.errors import ABSENT, ConfigError, Problem

from .base import Config
from .checks import check_sections
from .experiment import Experiment, derived_fields, with_derived_fields
from .schema import common_fields, common_fields_of_named, describe, help_text, locate, names, tag
from .type_errors import expectation
from .yaml import (
    Document,
    FieldPath,
    Staying,
    Tree,
    dotted,
    field_path,
    look_up,
    merged,
    parse_document,
    parse_value,
)

ORIGIN = "command line"
DEFAULT = "default"
DEFAULTS = "defaults"
_MAX_NAMED = 4  # variants in one sentence
_QUOTED = re.compile(r"'([^']*)'")  # the choices, as pydantic lists them: 'a', 'b' or 'c'

# Sections for which null is often written, and how to switch them off.
_SWITCHED_OFF = {
    "generation": "if nothing is sampled, no engine is started",
    "algorithm.validation": "it is off with `period: null, at_start: false, at_end: false`, its defaults",
}


def explain(error: ValidationError) -> list[Problem]:
    """One problem for each error that pydantic found."""
    return [_problem(details) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails) -> Problem:
    path, sections = locate(details["loc"])
    field, kind, value = dotted(path), details["type"], details["input"]
    context = details.get("ctx", {})
    match kind:
        case "missing":
            return Problem(field, ABSENT, f"this field is required{_help(details)}")
        case "extra_forbidden":
            return Problem(field, value, _unknown_field(details["loc"], path))
        case "union_tag_invalid":
            known = [name for section in sections for name in names(section)]
            where = f"{field}.{tag(sections[0])}"
            return Problem(where, context["tag"], _describe_choice(str(context["tag"]), known))
        case "union_tag_not_found":
            known = [name for section in sections for name in names(section)]
            where = f"{field}.{tag(sections[0])}"
            return Problem(where, ABSENT, f"this field is required; use one of {_listed(known)}")
        case "literal_error":
            return Problem(field, value, _describe_choice(str(value), _QUOTED.findall(context["expected"])))
        case "string_pattern_mismatch" if details["loc"][-1] == "[key]":
            fix = "invalid name; use small letters, digits and _, starting with a letter, such as `sums_2`"
            return Problem(dotted(path[:-2]), value, fix)
        case _ if value is None and kind.startswith("model") and _has_default(details):
            off = f"; {_SWITCHED_OFF[field]}" if field in _SWITCHED_OFF else ""
            fix = f"a section cannot be null; remove it to use its defaults{off}"
            return Problem(field, value, fix + _help(details))
        case _:
            return Problem(field, value, expectation(details) + _help(details))


def _has_default(details: ErrorDetails) -> bool:
    owners, name = _owners(details)
    return any(name in owner.model_fields and not owner.model_fields[name].is_required() for owner in owners)


def _owners(details: ErrorDetails) -> tuple[tuple[type[Config], ...], str]:
    """The sections that may hold the field of an error, in the selected variant, and its name."""
    location = details["loc"]
    while location and isinstance(location[-1], int):
        location = location[:-1]
    _, owners = locate(location[:-1])
    return owners, str(location[-1])


def _help(details: ErrorDetails) -> str:
    """The help of the field that an error is about."""
    owners, name = _owners(details)
    text = next((help_text(owner, name) for owner in owners if name in owner.model_fields), "")
    return f": {text}" if text else ""


def _describe_choice(given: str, known: list[str]) -> str:
    return f"unknown value; {_did_you_mean(given, known)}expected one of {_listed(known)}"


def _unknown_field(location: tuple[str | int, ...], path: FieldPath) -> str:
    name = str(path[-1])
    _, owners = locate(location[:-1])
    # The variants from which one was selected, whose name is the last step but one of the location.
    named = len(location) > 1 and any(location[-2] in names(owner) for owner in owners)
    around = locate(location[:-2])[1] if named else ()
    others = [section for section in around if name in section.model_fields]
    if others:
        theirs = [one for section in others for one in names(section)]
        which = f"{_listed(theirs[:_MAX_NAMED])}{' and others' * (len(theirs) > _MAX_NAMED)}"
        choice = dotted((*path[:-1], tag(owners[0])))
        return (
            f"this field belongs to {which}, and {choice} is `{location[-2]}`; remove it, or change {choice}"
        )
    known = sorted({field for owner in owners for field in owner.model_fields})
    elsewhere = sorted({f.path for f in describe() if f.path.rpartition(".")[2] == name} - {dotted(path)})
    nearby = [place for place in elsewhere if place.startswith(f"{path[0]}.")]
    elsewhere = (nearby or elsewhere)[:_MAX_NAMED]
    suggestion = f"did you mean {_listed(elsewhere)}? " if elsewhere else _did_you_mean(name, known)
    return f"unknown field; {suggestion or f'the fields here are {_listed(known)}'}".rstrip()


def _did_you_mean(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f"did you mean `{close[0]}`? " if close else ""


def _listed(items: Iterable[str]) -> str:
    return ", ".join(f"`{item}`" for item in items)


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Lay `a.b=value` pairs over a document; of two for one field the later wins.

    The value is YAML: `null`, `true`, `1e-6`, `[1, 2]`, `{name: sgd, lr: 0.1}`. A number in the path is an
    index of a list, `rewards.0.weight=2`. All pairs together are one layer, so their order does not matter
    if one of them changes the variant of a section. Raises `ConfigError`.
    """
    if not overrides:
        return document
    layer: Tree = {}
    origins: dict[FieldPath, str] = {}
    for override in overrides:
        path, value = _parsed(override)
        layer = _laid_over(layer, _nested(path, value), common_fields_of_named)
        origins |= _origins(path, value, document)
    _refuse_unknown_indexes(document.tree, layer, ())
    return Document(
        _laid_over(document.tree, layer, common_fields), document.origins | origins, document.problems
    )


def _parsed(override: str) -> tuple[list[str], object]:
    field, equals, text = override.partition("=")
    path = field.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(ORIGIN, [Problem("", override, _how_to_write(override), ORIGIN)])
    plain = _plain(field.strip())
    if plain != field.strip():
        fix = f"fields are separated by dots, also indexes of lists; write `{plain}={text}`"
        raise ConfigError(ORIGIN, [Problem("", override, fix, ORIGIN)])
    return path, parse_value(text, f"{ORIGIN}, {field.strip()}")


def _how_to_write(word: str) -> str:
    if word.endswith((".yaml", ".yml")):
        return "one experiment file is read, and it comes first; name others under `defaults:` in it"
    return (
        "expected an override `section.field=value` without spaces around `=`, such as "
        "`algorithm.num_steps=20`"
    )


def _plain(field: str) -> str:
    """The field for spellings of other tools: `+a/b`, `--a.b` and `a[0].b`."""
    return re.sub(r"\[(\d+)\]", r".\1", field).replace("/", ".").lstrip("+-~")


def _origins(path: list[str], value: object, document: Document) -> dict[FieldPath, str]:
    """All fields that an override sets, and the sections around them that no file has."""
    whole = field_path(".".join(path))
    around = [whole[:end] for end in range(1, len(whole))]
    return {section: ORIGIN for section in around if section not in document.origins} | dict.fromkeys(
        _paths(whole, value), ORIGIN
    )


def _paths(path: FieldPath, value: object) -> Iterator[FieldPath]:
    yield path
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _paths((*path, key), below)
    if isinstance(value, list):
        for place, below in enumerate(value):
            yield from _paths((*path, place), below)


def _nested(path: list[str], value: object) -> Tree:
    for key in reversed(path[1:]):
        value = {key: value}
    return {path[0]: value}


def _laid_over(base: Tree, over: Tree, staying: Staying) -> Tree:
    tree = merged(base, over, staying)
    assert isinstance(tree, dict)
    return tree


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


def read_document(file: Path) -> Document:
    """A file with everything it inherits.

    `defaults:` is a path or a list of paths, relative to the file that has it. They are read depth-first;
    later ones win over earlier ones, and the file itself over all (see `yaml.merged` and `common_fields`).
    Raises `ConfigError`: a file that is missing or unreadable, invalid YAML, circular inheritance.
    """
    return _read(file, ())


def _read(file: Path, heirs: tuple[Path, ...]) -> Document:
    """`heirs` are the files that led here, the requested one first."""
    own = parse_document(_text(file, heirs), str(file))
    result = Document({})
    for parent in _parents(own, file):
        _refuse_circle(parent, (*heirs, file))
        result = _over(result, _read(parent, (*heirs, file)))
    own.tree.pop(DEFAULTS, None)
    return _over(result, own)


def _over(base: Document, over: Document) -> Document:
    tree = merged(base.tree, over.tree, common_fields)
    assert isinstance(tree, dict)
    return Document(tree, base.origins | over.origins, base.problems + over.problems)


def _text(file: Path, heirs: tuple[Path, ...]) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        overrides = "=" in file.name and not heirs
        problem = "no such file" + (
            "; the experiment file comes first, and overrides such as this after it" if overrides else ""
        )
    except UnicodeDecodeError as error:
        problem = f"the file is not UTF-8 text: {error.reason} at byte {error.start}"
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}"
    source = str(heirs[0]) if heirs else str(file)
    named_by = f"; `{DEFAULTS}` of {heirs[-1]} names it" if heirs else ""
    raise ConfigError(
        source, [Problem(DEFAULTS if heirs else "", str(file), f"{problem}{named_by}", str(file))]
    )


def _parents(document: Document, file: Path) -> list[Path]:
    named = document.tree.get(DEFAULTS, [])
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        fix = "expected a path or a list of paths, relative to this file"
        raise ConfigError(str(file), [Problem(DEFAULTS, named, fix, document.origins[(DEFAULTS,)])])
    return [file.parent / name for name in names]


def _refuse_circle(parent: Path, heirs: tuple[Path, ...]) -> None:
    if parent.resolve() in {heir.resolve() for heir in heirs}:
        circle = " -> ".join(map(str, (*heirs, parent)))
        fix = f"circular inheritance, {circle}; remove one of the links"
        raise ConfigError(str(heirs[0]), [Problem(DEFAULTS, str(parent), fix, str(heirs[-1]))])


def load_experiment(
    path: Path,
    overrides: Sequence[str] = (),
    further_checks: Callable[[Experiment], Iterable[Problem]] | None = None,
) -> Experiment:
    """Read and check an experiment file, with `a.b=value` overrides from the command line.

    Raises `ConfigError` with all problems at once: those of types, the checks of valid sections, and, if all
    types are right, `further_checks` outside the configuration (see `nemorl.plan.problems`).
    """
    document = apply_overrides(read_document(path), overrides)
    problems = list(document.problems)
    experiment, refused = _typed(document.tree)
    known = {problem.field for problem in problems}
    problems += [problem for problem in refused if problem.field not in known]
    if experiment and not problems:
        experiment = experiment.model_copy(update=with_derived_fields(_sections(experiment)))
        sections = _sections(experiment)
        problems += further_checks(experiment) if further_checks else ()
    else:
        invalid = {problem.field.partition(".")[0] for problem in problems}
        sections = with_derived_fields(_valid_sections(document.tree, invalid))
    problems += check_sections(sections)
    if problems or experiment is None:
        raise ConfigError(str(path), [_with_origin(problem, document) for problem in problems])
    return experiment


def _sections(experiment: Experiment) -> dict[str, object]:
    return {name: getattr(experiment, name) for name in Experiment.model_fields}


class _Dumper(yaml.SafeDumper):
    """Quotes strings with characters that the reader takes for the end of a line."""


def _quoted_where_broken(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    breaks = any(character in text for character in "\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if breaks else None)


_Dumper.add_representer(str, _quoted_where_broken)


def to_yaml(experiment: Experiment) -> str:
    """The complete experiment, defaults included, as a file that `load_experiment` reads back.

    Derived fields have their reason as a comment.
    """
    tree = experiment.model_dump(mode="json")  # whose types turn paths into strings
    lines = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31).splitlines(True)
    origins = parse_document("".join(lines), "").origins
    for field, reason in derived_fields(_sections(experiment)).items():
        index = int(origins[field_path(field)].lstrip(":")) - 1
        lines[index] = f"{lines[index].rstrip()}  # {reason}\n"
    return "".join(lines)


def _typed(tree: Tree) -> tuple[Experiment | None, list[Problem]]:
    try:
        return Experiment.model_validate(tree), []
    except ValidationError as error:
        return None, explain(error)


def _valid_sections(tree: Tree, invalid: set[str]) -> dict[str, object]:
    """The sections without problems, so that the checks between them still run."""
    valid = {name: field for name, field in Experiment.model_fields.items() if name not in invalid}
    fields = {name: (field.annotation, field) for name, field in valid.items()}
    partial = create_model("PartialExperiment", __base__=Config, **fields)  # type: ignore[call-overload]
    values = partial.model_validate({name: tree[name] for name in valid if name in tree})
    return {name: getattr(values, name) for name in valid}


def _with_origin(problem: Problem, document: Document) -> Problem:
    """Add the line of the field, or of the section around it."""
    if problem.origin or not problem.field:
        return problem
    path = field_path(problem.field)
    if problem.value is not ABSENT and not _is_written(document.tree, path):
        return replace(problem, origin=DEFAULT)
    while path and not (path in document.origins and _is_written(document.tree, path)):
        path = path[:-1]
    return replace(problem, origin=document.origins.get(path, ""))


def _is_written(tree: Tree, path: FieldPath) -> bool:
    try:
        look_up(tree, path)
    except LookupError:
        return False
    return True
