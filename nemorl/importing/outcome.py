"""What each key of a config decides next to the others: the fields that change with its value.

A rule names all fields that its keys may set, and some of its keys do nothing next to others, such as the
size of micro-batches where their tokens are counted. So the rules of a key are applied again without it and
with other values of it, and the fields are compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from nemorl.config.yaml import leaves

from .rules import WRONG_TYPE, CannotImport, Imported, Origin, Part, Row, Rule, RuleIndex, place, written

NO_EFFECT = "no effect next to the other keys"
_ABSENT = object()


def settled(imported: Imported, rules: Sequence[Rule], origin: Origin) -> Imported:
    """The same with rows that name the fields which their key decides.

    A number or truth value that decides nothing has the outcome `none`. A row stays as it is where nothing
    differs and the key is text, which may have further values, or where other values are refused.
    """
    index, every = RuleIndex(rules), _parts(rules)

    def row_of(row: Row) -> Row:
        others = list(_others(origin, row))
        # Most keys decide fields of their own rules, which are few.
        changed = _changed(_parts(index.of(row.key)), origin, others) or _changed(every, origin, others)
        if changed:
            return replace(row, fields=changed)
        if changed is None or row.outcome != "mapped" or not isinstance(row.value, int | float):
            return row
        return Row(row.key, row.value, "none", (), NO_EFFECT)

    return replace(imported, rows=tuple(row_of(row) if row.fields else row for row in imported.rows))


def _parts(rules: Sequence[Rule]) -> list[Part]:
    return [rule for rule in rules if isinstance(rule, Part)]


def _others(origin: Origin, row: Row) -> Iterator[Origin]:
    """The config without a key, and with other values of it."""
    rest = {key: value for key, value in origin.values.items() if key != row.key}
    for given in ({}, *({row.key: other} for other in _other_values(row.value))):
        yield Origin(rest | given, origin.options, origin.defaults)


def _other_values(value: object) -> tuple[object, ...]:
    match value:
        case bool():
            return (not value,)
        case int():
            return value * 2, value + 1, value // 2, 0, 1
        case float():
            return value * 2, value + 1, value / 2, 0.0, 1.0
    return ()


def _changed(parts: Sequence[Part], origin: Origin, others: Sequence[Origin]) -> tuple[str, ...] | None:
    """The fields of the experiment that differ in one of the others, or else what only those have.

    None if none differs, but some of the others are refused.
    """
    before = _made(parts, origin) or {}
    made = [_made(parts, other) for other in others]
    differing = dict.fromkeys(
        path
        for after in made
        if after is not None
        for path in before | after
        if before.get(path, _ABSENT) != after.get(path, _ABSENT)
    )
    if not differing and None in made:
        return None
    return tuple([path for path in differing if path in before] or differing)


def _made(parts: Sequence[Part], origin: Origin) -> dict[str, Any] | None:
    """The values that rules write, by the dotted paths of their fields; None for what is refused."""
    tree: dict[str, Any] = {}
    try:
        for part in parts:
            for path, value in written(part, origin).items():
                place(tree, path, value)
    except (CannotImport, *WRONG_TYPE):
        return None
    return dict(leaves(tree))
