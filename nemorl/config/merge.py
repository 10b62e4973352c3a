"""One tree laid over another: inheritance and command-line overrides."""

from .yaml_tree import Tree

# The keys that say which variant of a section is meant.
VARIANT_KEYS = ("name", "backend")


def merged(base: object, over: object) -> object:
    """`over` laid over `base`, neither changed.

    Sections (mappings) merge key by key; everything else, lists included, is replaced. A section that names
    another variant than its base (`name` or `backend` differs) replaces it whole, so that no key of the old
    variant is left. A mapping of numbers laid over a list (`rewards.0.weight=2`) changes those items.
    """
    if isinstance(base, list) and isinstance(over, dict) and _indexes(over, len(base)):
        return [merged(item, over[str(i)]) if str(i) in over else item for i, item in enumerate(base)]
    if not (isinstance(base, dict) and isinstance(over, dict)) or changes_variant(base, over):
        return over
    return base | {key: merged(base[key], value) if key in base else value for key, value in over.items()}


def changes_variant(base: Tree, over: Tree) -> bool:
    """Whether both name their variant, and not the same one."""
    return any(key in base and key in over and base[key] != over[key] for key in VARIANT_KEYS)


def _indexes(over: Tree, length: int) -> bool:
    return bool(over) and all(key.isdecimal() and int(key) < length for key in over)
