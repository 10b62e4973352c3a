"""Object references inside arguments: found, and replaced by what they refer to."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import ray


def references_in(tree: Any) -> list[ray.ObjectRef]:
    """All references in nested lists, tuples, dicts and dataclasses, each once, in order."""
    found: dict[ray.ObjectRef, None] = {}
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ray.ObjectRef):
            found[node] = None
        else:
            waiting.extend(reversed([child for _, child in _children(node)]))
    return list(found)


def with_values(tree: Any, values: Mapping[ray.ObjectRef, Any]) -> Any:
    """The same structure with every reference replaced by its value; the rest is kept as it is."""
    if isinstance(tree, ray.ObjectRef):
        return values[tree]
    replaced = {key: with_values(child, values) for key, child in _children(tree)}
    if all(replaced[key] is child for key, child in _children(tree)):
        return tree
    if isinstance(tree, dict):
        return replaced
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **replaced)
    return tuple(replaced.values()) if isinstance(tree, tuple) else list(replaced.values())


def _children(node: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and parts of what can hold references; nothing for a leaf."""
    if isinstance(node, dict):
        return node.items()
    if isinstance(node, list) or type(node) is tuple:
        return enumerate(node)
    if is_dataclass(node) and not isinstance(node, type):
        return [(f.name, getattr(node, f.name)) for f in fields(node) if f.init]
    return ()
