"""The forms of an experiment, from the schema: its sections and fields, with their values and origins.

A node is a field, a section (whose fields are nodes), a list of sections or a mapping of them, all as JSON.
Of a union the fields of the chosen variant are there, and of a section that is null none until it is added.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from nemorl.config.algorithm.base import AlgorithmBase
from nemorl.config.base import Config, FieldLevel
from nemorl.config.experiment import Experiment, derived_fields
from nemorl.config.load import Loaded
from nemorl.config.schema import help_text, highest, level_of, names, tag, type_text, variants
from nemorl.config.yaml import FieldPath, Tree, dotted, is_written

Node = dict[str, Any]
_KINDS: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "text", Path: "path"}
_LIMITS = {"ge": "min", "gt": "above", "le": "max", "lt": "below", "min_length": "min_length"}


@dataclass(frozen=True)
class _Source:
    """Where values of one file come from."""

    tree: Tree  # of the file with what it inherits
    own: Tree  # of the file alone
    origins: Mapping[FieldPath, str]
    derived: Mapping[str, str]  # reasons of fields that follow from others, by dotted paths
    preset: str  # the name of the algorithm

    def origin(self, path: FieldPath, *, is_default: bool) -> str:
        """`file:line`, `default`, or what else decides."""
        if path in self.origins and is_written(self.tree, path):
            return self.origins[path]
        if dotted(path) in self.derived:
            return self.derived[dotted(path)]
        return "default" if is_default or path[0] != "algorithm" else f"preset {self.preset}"

    def is_own(self, path: FieldPath) -> bool:
        return is_written(self.own, path)


def form(loaded: Loaded, own: Tree) -> list[Node]:
    """The nodes of the experiment's sections; `own` is the tree of the file without what it inherits."""
    algorithm = loaded.sections.get("algorithm")
    preset = str(getattr(algorithm, "name", ""))
    derived = derived_fields(loaded.sections)
    source = _Source(loaded.document.tree, own, loaded.document.origins, derived, preset)
    unused = unused_sections(algorithm) if isinstance(algorithm, AlgorithmBase) else {}
    nodes = list(_fields(Experiment, (), loaded.document.tree, loaded.sections, source, "simple"))
    return [{**node, "unused": unused.get(node["name"], "")} for node in nodes]


def unused_sections(algorithm: AlgorithmBase) -> dict[str, str]:
    """The sections that an algorithm does not use, with the reason."""
    uses_reference = algorithm.reference_field is not None and algorithm.keeps_reference
    used = {
        "generation": (algorithm.generates, "samples nothing"),
        "env": (algorithm.generates, "samples nothing"),
        "rewards": (algorithm.generates, "samples nothing"),
        "critic": (algorithm.keeps_critic, "has no critic"),
        "reference": (uses_reference, "has no reference in processes of its own"),
        "teachers": (algorithm.keeps_teachers, "has no teachers"),
    }
    return {
        name: f"{getattr(algorithm, 'name', '')} {why}"
        for name, (is_used, why) in used.items()
        if not is_used
    }


def _fields(
    section: type[Config], path: FieldPath, tree: Any, values: Any, source: _Source, around: FieldLevel
) -> Iterator[Node]:
    """`tree` is what files say of the section, `values` the checked section, or None where it is invalid."""
    for name, field in section.model_fields.items():
        if path and name == tag(section) and names(section):
            continue  # it selects the variant
        here, level = (*path, name), highest(around, level_of(section, name))
        written = tree.get(name) if isinstance(tree, dict) else None
        value = values.get(name) if isinstance(values, Mapping) else getattr(values, name, None)
        about = {"path": list(here), "name": name, "help": help_text(section, name), "level": level}
        if below := variants(field.annotation):
            yield _sections(about, field, below, written, value, source)
        else:
            is_checked = values is not None and (not isinstance(values, Mapping) or name in values)
            yield _field(about, field, written, value if is_checked else written, source)


def _sections(
    about: Node, field: FieldInfo, below: tuple[type[Config], ...], tree: Any, value: Any, source: _Source
) -> Node:
    path, level = tuple(about["path"]), about["level"]
    outer = get_origin(field.annotation)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    about |= {
        "origin": source.origin(path, is_default=value == default),
        "is_own": source.is_own(path),
        "required": field.is_required(),
    }
    if outer in (tuple, dict):
        kind = "sections" if outer is tuple else "mapping"
        members: dict[str | int, Any] = {}
        if isinstance(tree, dict):
            members = dict(tree)
        elif isinstance(tree, list):
            members = dict(enumerate(tree))
        elif value:
            members = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        items = []
        for key, item in members.items():
            checked = None
            if value is not None and (key in value if isinstance(value, dict) else int(key) < len(value)):
                checked = value[key]
            of_item = {"path": [*path, key], "name": str(key), "help": "", "level": level}
            of_item |= {"is_own": source.is_own((*path, key)), "required": True, "nullable": False}
            of_item["origin"] = source.origin((*path, key), is_default=False)
            items.append(_section(of_item, below, item, checked, None, source))
        return {**about, "kind": kind, "items": items, "variants": _variants(below), "tag": tag(below[0])}
    about["nullable"] = type(None) in get_args(field.annotation)
    return _section(about, below, tree, value, default, source)


def _section(
    about: Node, below: tuple[type[Config], ...], tree: Any, value: Any, default: Any, source: _Source
) -> Node:
    """One section, with the fields of its variant."""
    key, path = tag(below[0]), tuple(about["path"])
    is_union = bool(names(below[0]))
    chosen: type[Config] | None = type(value) if isinstance(value, below) else None
    name = tree.get(key) if isinstance(tree, dict) else tree if isinstance(tree, str) else None
    if chosen is None and is_union:
        chosen = next((one for one in below if name in names(one)), None)
        if chosen is None and name is None:
            chosen = type(default) if isinstance(default, below) else next(filter(_has_name, below), None)
    elif chosen is None:
        chosen = below[0]
    is_present = value is not None or tree is not None or (default is not None or not about["nullable"])
    fields: list[Node] = []
    if chosen is not None and is_present:
        fields = list(_fields(chosen, path, tree, value, source, about["level"]))
    node = {**about, "kind": "section", "present": is_present, "fields": fields}
    if is_union:
        given = getattr(value, key, name)
        if given is None and chosen is not None:
            given = chosen.model_fields[key].default if _has_name(chosen) else None
        node |= {"tag": key, "chosen": given, "variants": _variants(below)}
        node["tag_origin"] = source.origin((*path, key), is_default=True)
    return node


def _has_name(section: type[Config]) -> bool:
    field = section.model_fields.get(tag(section))
    return field is not None and not field.is_required()


def _variants(below: tuple[type[Config], ...]) -> list[Node]:
    """The names of a union's sections, each with its help and the fields that it must be given."""
    found = []
    for section in below:
        first, *_ = (section.__doc__ or "").split("\n\n")
        words = help_text(section, tag(section)) or " ".join(first.split())
        required = [n for n, f in section.model_fields.items() if f.is_required() and n != tag(section)]
        about = {"help": words, "required": required, "fields": list(section.model_fields)}
        found += [{"name": name, **about} for name in names(section) or ("",)]
    return found


def _field(about: Node, field: FieldInfo, written: Any, value: Any, source: _Source) -> Node:
    path = tuple(about["path"])
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if not is_written(source.tree, path) and value is None:
        value = default
    plain = to_jsonable_python(value if written is None or value is not None else written, fallback=str)
    return {
        **about,
        **_kind(field.annotation),
        **_limits(field),
        "type": type_text(field),
        "required": field.is_required(),
        "default": to_jsonable_python(default, fallback=str),
        "value": plain,
        "origin": source.origin(path, is_default=value == default),
        "is_own": source.is_own(path),
    }


def _kind(annotation: Any) -> Node:
    """`kind` of a field's input, with its `choices` and whether it is `nullable`; of a list its `item`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return {"kind": "choice", "choices": list(arguments), "nullable": False}
    if origin in (Union, UnionType):
        parts = [part for part in arguments if part is not type(None)]
        known = [_kind(part) for part in parts]
        found = known[0] if len(parts) == 1 else {"kind": "any"}
        if len(parts) > 1 and all(one["kind"] == "choice" for one in known):
            found = {"kind": "choice", "choices": [choice for one in known for choice in one["choices"]]}
        return {**found, "nullable": type(None) in arguments}
    if origin is tuple:
        return {"kind": "list", "item": _kind(arguments[0]), "nullable": False}
    return {"kind": "map" if origin is dict else _KINDS.get(annotation, "any"), "nullable": False}


def _limits(field: FieldInfo) -> Node:
    """The limits of a number, also where null is allowed."""
    found = {}
    for constraint in field.metadata:
        for name, key in _LIMITS.items():
            if (bound := getattr(constraint, name, None)) is not None:
                found[key] = bound
    return found


def walk(nodes: list[Node]) -> Iterator[Node]:
    """All nodes, those in sections too."""
    for node in nodes:
        yield node
        yield from walk(node.get("fields", []))
        yield from walk(node.get("items", []))
