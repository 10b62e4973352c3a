"""The schema as data: sections, fields and their help; and what stays of a section whose variant changes."""

import ast
import inspect
import itertools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from nemorl.errors import ABSENT

from .algorithm.online import PRESETS
from .algorithm.pair_losses import PREFERENCE_PRESETS
from .base import LEVELS, Config, FieldLevel
from .experiment import Experiment
from .yaml import VARIANT_KEYS, FieldPath, Tree, dotted

_PLAIN_TYPES = {int: "integer", float: "number", str: "string", bool: "true or false", Path: "path"}
_MAX_NAMES = 4  # of one variant, where it is called by them


@dataclass(frozen=True)
class FieldHelp:
    """One field as `nemorl config` shows it."""

    path: str  # such as `policy.optimizer.lr`; items of a list as `rewards.0.weight`
    variant: str  # the `name` or `backend` under which the field exists; empty where it always does
    type: str
    default: object  # ABSENT where the field is required
    help: str
    level: FieldLevel


def variants(annotation: Any) -> tuple[type[Config], ...]:
    """The section classes that a field of this type may have: none for a plain value, several for a union."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return (annotation,)
    return tuple(variant for part in get_args(annotation) for variant in variants(part))


def tag(variant: type[Config]) -> str:
    """The field that selects this variant of a section: `name`, `kind`, `backend` or `method`."""
    return next((key for key in VARIANT_KEYS if key in variant.model_fields), VARIANT_KEYS[0])


def names(variant: type[Config]) -> tuple[str, ...]:
    """The values of that field for this variant; none for a section without variants."""
    field = variant.model_fields.get(tag(variant))
    return get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()


def locate(location: tuple[str | int, ...]) -> tuple[FieldPath, tuple[type[Config], ...]]:
    """The path of a location of pydantic's, which also names variants, and the classes it may have."""
    sections: tuple[type[Config], ...] = (Experiment,)
    path: FieldPath = ()
    is_key = False  # of a mapping of sections
    for step in location:
        if is_key:
            path, is_key = (*path, step), False
            continue
        chosen = tuple(section for section in sections if step in names(section))
        # A field may be called as the variant that it is in: `env`, the variant `tools`, its field `tools`.
        if chosen and len(sections) > 1:
            sections = chosen
            continue
        path = (*path, step)
        if isinstance(step, str):
            fields = [section.model_fields[step] for section in sections if step in section.model_fields]
            found = (variant for field in fields for variant in variants(field.annotation))
            sections = tuple(dict.fromkeys(found))
            is_key = any(get_origin(field.annotation) is dict for field in fields)
    return path, sections


def describe(prefix: str = "") -> list[FieldHelp]:
    """All fields below a section, in the order of the schema; all of them for the empty prefix."""
    start = f"{prefix}." if prefix else ""
    return [field for field in _everything() if f"{field.path}.".startswith(start)]


def section_help(section: str) -> str:
    """The help of a section; empty for the experiment itself and for items of a list."""
    *around, name = section.split(".")
    for owner in locate(tuple(around))[1] if name else ():
        if name in owner.model_fields:
            return help_text(owner, name)
    return ""


def level_of(section: type[Config], name: str) -> FieldLevel:
    """The level of a field alone: of one that must be given, and of one that selects a variant, `simple`."""
    field = section.model_fields[name]
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra.get("level") in LEVELS:
        return LEVELS[LEVELS.index(extra["level"])]
    if variants(field.annotation):  # of a section that is always there, its own fields say it
        return section.field_level if _may_be_absent(field) else "simple"
    is_choice = name == tag(section) and bool(names(section))
    return "simple" if field.is_required() or is_choice else section.field_level


def highest(*levels: FieldLevel) -> FieldLevel:
    return max(levels, key=LEVELS.index)


def _may_be_absent(field: FieldInfo) -> bool:
    """True of null, of a list and of a mapping of sections."""
    return type(None) in get_args(field.annotation) or get_origin(field.annotation) in (tuple, dict)


@cache
def _everything() -> tuple[FieldHelp, ...]:
    return tuple(_fields(Experiment, (), "simple"))


def _fields(section: type[Config], path: FieldPath, around: FieldLevel) -> Iterator[FieldHelp]:
    for name, field in section.model_fields.items():
        below = variants(field.annotation)
        here = (*path, name)
        level = highest(around, level_of(section, name))
        if not below:
            default = ABSENT if field.is_required() else field.get_default(call_default_factory=True)
            yield FieldHelp(dotted(here), "", type_text(field), default, help_text(section, name), level)
            continue
        if get_origin(field.annotation) is tuple:
            here = (*here, 0)
        if get_origin(field.annotation) is dict:
            here = (*here, "NAME")  # which the user chooses
        is_one = len(below) == 1
        yield from _fields(below[0], here, level) if is_one else _fields_of_union(below, here, level)


def _fields_of_union(
    sections: tuple[type[Config], ...], path: FieldPath, level: FieldLevel
) -> Iterator[FieldHelp]:
    """The field that selects the variant, the fields of all variants, and those of some, each once."""
    key = tag(sections[0])
    kinds = " | ".join(name for section in sections for name in names(section))
    default = next((s.model_fields[key].default for s in sections if _is_default(s)), ABSENT)
    described = []
    for section in sections:
        first, *_ = (section.__doc__ or "").split("\n\n")
        if words := help_text(section, key) or " ".join(first.split()):
            described.append(f"`{_label(section)}`: {words}")
    choice = FieldHelp(dotted((*path, key)), "", kinds, default, " ".join(described), level)

    owners: dict[str, tuple[FieldHelp, list[type[Config]]]] = {}  # by all that is shown of a field
    for section in sections:
        for field in _fields(section, path, level):
            if field.path != choice.path:
                owners.setdefault(repr(field), (field, []))[1].append(section)
    yield choice
    yield from (field for field, those in owners.values() if len(those) == len(sections))
    for field, those in owners.values():
        others = [section for section in sections if section not in those]
        who = "|".join(map(_label, those))
        if len(those) > 3 * len(others):  # shorter
            who = f"not {'|'.join(map(_label, others))}"
        if others:
            yield replace(field, variant=field.variant or who)


def _label(section: type[Config]) -> str:
    """A variant by its names, or by its class if these are many: `online`."""
    known = names(section)
    return "|".join(known) if len(known) <= _MAX_NAMES else section.__name__.removesuffix("Config").lower()


def help_text(section: type[Config], field: str) -> str:
    """A field's help in one line; a variant that only changes the default inherits it."""
    owners = (owner for owner in section.__mro__ if issubclass(owner, Config))
    texts = (_texts_under_fields(owner.__module__).get((owner.__name__, field)) for owner in owners)
    return " ".join(next((text for text in texts if text), "").split())


@cache
def _texts_under_fields(module: str) -> dict[tuple[str, str], str]:
    """The string under each annotated field of a module's classes, by the names of class and field.

    Read when help is asked for: every process imports the sections, and pydantic's own way of reading these
    strings takes longer than the rest of that import.
    """
    found = {}
    sections = (node for node in ast.walk(ast.parse(_source(module))) if isinstance(node, ast.ClassDef))
    for section in sections:
        for pair in itertools.pairwise(section.body):
            match pair:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[section.name, name] = text
    return found


def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # removed, without a file, or typed into an interpreter
        return ""


def type_text(field: FieldInfo) -> str:
    """A field's type in words, with its bounds: `integer >= 1 or null`."""
    bounds = [
        f"{sign} {bound}"
        for constraint in field.metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if (bound := getattr(constraint, name, None)) is not None
    ]
    words, *rest = _words(field.annotation).split(" or null")
    return " ".join([words, ", ".join(bounds)]).strip() + (" or null" if rest else "")


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        parts = [_words(part) for part in arguments if part is not type(None)]
        return " or ".join([*parts, "null"] if type(None) in arguments else parts)
    if origin is tuple:
        return f"list of {_words(arguments[0])}"
    if origin is dict:
        return "mapping"
    return _PLAIN_TYPES[annotation]


def _is_default(variant: type[Config]) -> bool:
    key = tag(variant)
    return key in variant.model_fields and not variant.model_fields[key].is_required()


def common_fields(path: FieldPath, base: Tree, over: Tree) -> Tree:
    """For one file over another: a section without a variant has the default one, if there is one."""
    return _staying(path, base, over, unnamed=next(filter(_is_default, locate(path)[1]), None))


def common_fields_of_named(path: FieldPath, base: Tree, over: Tree) -> Tree:
    """For overrides among each other, in any order: one without a variant has the one that another names."""
    return _staying(path, base, over, unnamed=None)


def _staying(path: FieldPath, base: Tree, over: Tree, unnamed: type[Config] | None) -> Tree:
    """For `generation.backend=vllm` over a file with `torch`, the fields of their common base class stay.

    The other fields of the old variant are dropped, and so are the parts that a preset sets: the settings of
    GRPO's loss would turn DAPO's into another. Unknown fields stay, for the new variant to refuse.
    """
    sections = locate(path)[1]
    key = tag(sections[0]) if sections else ""
    if len(sections) < 2 or key not in over or base.get(key) == over[key]:
        return base
    by_name = {name: section for section in sections for name in names(section)}
    old = by_name.get(str(base[key])) if key in base else unnamed
    new = by_name.get(str(over[key]))
    if old is None or new is None:  # an unknown name is refused later
        return base
    parts: set[str] = set()  # that a preset sets
    for name in (base.get(key), over[key]) if path == ("algorithm",) else ():
        if preset := PRESETS.get(str(name)) or PREFERENCE_PRESETS.get(str(name)):
            parts |= preset.settings.keys()
    return {
        name: value
        for name, value in base.items()
        if name not in old.model_fields
        or (
            name not in parts
            and name in new.model_fields
            and _declaration(old, name) is _declaration(new, name)
        )
    }


def _declaration(section: type[Config], field: str) -> type:
    """The class that declares a section's field; variants that share a field share its class."""
    return next(owner for owner in reversed(section.__mro__) if field in inspect.get_annotations(owner))
