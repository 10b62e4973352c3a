"""The schema, looked at from outside: which sections and fields there are, and what their help says."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from nemorl.errors import ABSENT

from .base import Config
from .experiment import Experiment
from .merge import VARIANT_KEYS
from .yaml_tree import FieldPath, dotted


@dataclass(frozen=True)
class FieldHelp:
    """One field as `nemorl config` shows it."""

    path: str  # such as `policy.optimizer.lr`; items of a list as `rewards.0.weight`
    variant: str  # the `name` or `backend` under which the field exists; empty where there is one variant
    type: str
    default: object  # ABSENT where the field is required
    help: str


def variants(annotation: Any) -> tuple[type[Config], ...]:
    """The sections that a field of this type may hold: none for a plain value, several for a union."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return (annotation,)
    if get_origin(annotation) is Annotated:
        return variants(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return tuple(variant for part in get_args(annotation) for variant in variants(part))
    return ()


def tag(variant: type[Config]) -> str:
    """The field that tells this variant of a section from others: `name`, or `backend`."""
    return next((key for key in VARIANT_KEYS if key in variant.model_fields), VARIANT_KEYS[0])


def names(variant: type[Config]) -> tuple[str, ...]:
    """What that field may say for this variant; nothing for a section without variants."""
    field = variant.model_fields.get(tag(variant))
    return get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()


def locate(location: tuple[str | int, ...]) -> tuple[FieldPath, tuple[type[Config], ...]]:
    """A location as pydantic gives it: the path as people write it, and the sections that may stand there.

    Pydantic puts the name of a union's variant into its locations; people do not write it.
    """
    sections: tuple[type[Config], ...] = (Experiment,)
    path: FieldPath = ()
    for step in location:
        chosen = tuple(section for section in sections if step in names(section))
        if chosen:
            sections = chosen
            continue
        path = (*path, step)
        if isinstance(step, str):
            fields = [section.model_fields[step] for section in sections if step in section.model_fields]
            sections = tuple(variant for field in fields for variant in variants(field.annotation))
    return path, sections


def describe(prefix: str = "") -> list[FieldHelp]:
    """All fields below a section, in the order of the schema; all of them for the empty prefix."""
    return [
        field
        for field in _fields(Experiment, (), "")
        if not prefix or field.path == prefix or field.path.startswith(f"{prefix}.")
    ]


def _fields(section: type[Config], path: FieldPath, variant: str) -> Iterator[FieldHelp]:
    for name, field in section.model_fields.items():
        below = variants(field.annotation)
        here = (*path, name)
        if not below:
            default = ABSENT if field.is_required() else field.get_default(call_default_factory=True)
            yield FieldHelp(dotted(here), variant, type_text(field), default, field.description or "")
            continue
        if get_origin(field.annotation) is tuple:
            here = (*here, 0)
        for part in below:
            yield from _fields(part, here, "|".join(names(part)) if len(below) > 1 else variant)


def type_text(field: FieldInfo) -> str:
    """A field's type in words, with its bounds: `whole number >= 1 or null`."""
    bounds = [
        f"{sign} {bound}"
        for constraint in field.metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if (bound := getattr(constraint, name, None)) is not None
    ]
    words, *rest = _words(field.annotation).split(" or null")
    return " ".join([words, ", ".join(bounds)]).strip() + (" or null" if rest else "")


_PLAIN_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}


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
