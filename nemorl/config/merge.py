"""One tree laid over another: inheritance, command-line overrides, presets."""

from collections.abc import Callable

from .yaml import FieldPath, Tree

# The keys that say which variant of a section is meant.
VARIANT_KEYS = ("kind", "name", "backend")

Staying = Callable[[FieldPath, Tree, Tree], Tree]
"""What stays of the section at a path when another is laid over it."""


def all_of_the_same_variant(path: FieldPath, base: Tree, over: Tree) -> Tree:
    """Nothing where both name their variant, and not the same one; else everything."""
    changes = any(key in base and key in over and base[key] != over[key] for key in VARIANT_KEYS)
    return {} if changes else base


def merged(
    base: object, over: object, staying: Staying = all_of_the_same_variant, path: FieldPath = ()
) -> object:
    """`over` laid over `base`, neither changed; `path` is where they stand.

    Sections (mappings) merge key by key, after `staying` has said what remains of the one below; everything
    else, lists included, is replaced. A mapping of numbers laid over a list (`rewards.0.weight=2`) changes
    those items.
    """
    if isinstance(base, list) and isinstance(over, dict) and _indexes(over, len(base)):
        return [
            merged(item, over[str(i)], staying, (*path, i)) if str(i) in over else item
            for i, item in enumerate(base)
        ]
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    below = staying(path, base, over)
    return below | {
        key: merged(below[key], value, staying, (*path, key)) if key in below else value
        for key, value in over.items()
    }


def _indexes(over: Tree, length: int) -> bool:
    return bool(over) and all(key.isdecimal() and int(key) < length for key in over)
