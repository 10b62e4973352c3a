"""`a.b=value` on the command line."""

import re
from collections.abc import Iterator, Sequence

from nemorl.errors import ConfigError, Violation

from .merge import Staying, merged
from .variants import common_fields, common_fields_of_named
from .yaml import Document, FieldPath, Tree, dotted, field_path, parse_value

ORIGIN = "command line"


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Lay `a.b=value` pairs over a document; of two for one field the later wins.

    The value is YAML: `null`, `true`, `1e-6`, `[1, 2]`, `{name: sgd, lr: 0.1}`. A number in the path is a
    place in a list, `rewards.0.weight=2`. All pairs together are one layer, so their order does not matter
    where one of them changes the variant of a section. Raises `ConfigError`.
    """
    if not overrides:
        return document
    layer: Tree = {}
    origins: dict[FieldPath, str] = {}
    for override in overrides:
        path, value = _parsed(override)
        layer = _laid_over(layer, _nested(path, value), common_fields_of_named)
        origins |= _origins(path, value, document)
    _refuse_unknown_places(document.tree, layer, ())
    return Document(_laid_over(document.tree, layer, common_fields), document.origins | origins)


def _parsed(override: str) -> tuple[list[str], object]:
    field, equals, text = override.partition("=")
    path = field.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(ORIGIN, [Violation("", override, _how_to_write(override), ORIGIN)])
    plain = _plain(field.strip())
    if plain != field.strip():
        mend = f"fields are named with dots, places in lists by their number: write `{plain}={text}`"
        raise ConfigError(ORIGIN, [Violation("", override, mend, ORIGIN)])
    return path, parse_value(text, f"{ORIGIN}, {field.strip()}")


def _how_to_write(word: str) -> str:
    if word.endswith((".yaml", ".yml")):
        return "one experiment file is read, and it comes first: name others under `defaults:` in it"
    return (
        "an override is one word, `section.field=value`, without spaces around `=`, such as "
        "`algorithm.num_steps=20`"
    )


def _plain(field: str) -> str:
    """As it is written here what other tools write `+a/b`, `--a.b` and `a[0].b`."""
    return re.sub(r"\[(\d+)\]", r".\1", field).replace("/", ".").lstrip("+-~")


def _origins(path: list[str], value: object, document: Document) -> dict[FieldPath, str]:
    """All that an override says, and the sections around it that no file has."""
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


def _refuse_unknown_places(base: object, over: object, path: FieldPath) -> None:
    """A place that a list does not have would turn the list into a mapping."""
    if not isinstance(over, dict):
        return
    for key, value in over.items():
        if isinstance(base, list) and not (key.isdecimal() and int(key) < len(base)):
            places = f"places 0 to {len(base) - 1}" if base else "no item"
            mend = f"the list has {places}: name one of them, or give the whole list as `[...]`"
            raise ConfigError(ORIGIN, [Violation(dotted((*path, key)), value, mend, ORIGIN)])
        if isinstance(base, list):
            _refuse_unknown_places(base[int(key)], value, (*path, int(key)))
        elif isinstance(base, dict):
            _refuse_unknown_places(base.get(key), value, (*path, key))
