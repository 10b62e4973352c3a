"""YAML text to plain Python values, with the line of every value; and one tree laid over another.

The scalars are those of YAML 1.2's core schema: `1e-6` is a number and `no` is a string, which YAML 1.1 and
PyYAML's loaders read as a string and as false.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml

from nemorl.errors import ABSENT, ConfigError, Problem

FieldPath = tuple[str | int, ...]
Tree = dict[str, object]
VARIANT_KEYS = ("kind", "name", "backend", "method")  # the fields that select the variant of a section
Staying = Callable[[FieldPath, Tree, Tree], Tree]
"""What remains of the section at a path when another is laid over it."""
_TAG = "tag:yaml.org,2002:"
_REFERENCE = re.compile(r"\$\{\s*[A-Za-z_][\w.]*\s*\}")  # `${a.b}`, once the value of another field


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own attribute: the scalars of YAML 1.1 are left behind)


# In this order, because every int would match the float, too.
for _tag, _pattern, _first_characters in (
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"[-+]?[0-9]+$", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", list("-+.")),
):
    _Loader.add_implicit_resolver(_TAG + _tag, re.compile(_pattern), _first_characters)
# PyYAML's own would read 010 as octal.
_Loader.add_constructor(_TAG + "int", lambda _, node: int(node.value))


@dataclass
class Document:
    """A mapping of sections, and the origin of each of its values as `file:line`."""

    tree: Tree
    origins: dict[FieldPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)  # of single values; the tree is complete


def dotted(path: FieldPath) -> str:
    """A path as it is written: `rewards.0.weight`."""
    return ".".join(map(str, path))


def field_path(text: str) -> FieldPath:
    """The inverse of `dotted`; a number is an index of a list."""
    return tuple(int(key) if key.isdecimal() else key for key in text.split("."))


def is_written(tree: Any, path: FieldPath) -> bool:
    """True if a tree has a value at a path."""
    try:
        for step in path:
            tree = tree[step if isinstance(tree, list) else str(step)]
    except (LookupError, TypeError):  # no such key or index, or a plain value where the path continues
        return False
    return True


def parse_document(text: str, source: str) -> Document:
    """Read a YAML mapping, empty for an empty text. Raises `ConfigError` naming `source` and the line."""
    reader = _Reader(text, source)
    root = reader.root()
    if root is None:
        return Document({})
    if not isinstance(root, yaml.MappingNode):
        raise reader.refused(root, (), ABSENT, "expected sections such as `policy:` at the top level")
    return Document(reader.mapping(root, ()), reader.origins, reader.problems)


def parse_value(text: str, source: str, path: FieldPath) -> object:
    """Read the YAML value of a field, such as the right side of `a.b=value`. Raises `ConfigError`."""
    reader = _Reader(text, source)
    root = reader.root()
    value = None if root is None else reader.value(root, path)
    if reader.problems:
        raise ConfigError(source, reader.problems)
    return value


class _Reader:
    """Reads one text. PyYAML parses it; the values are built here to keep their lines."""

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._around: list[yaml.Node] = []  # the collections that contain the current node
        self.origins: dict[FieldPath, str] = {}
        self.problems: list[Problem] = []

    def root(self) -> yaml.Node | None:
        try:
            self._loader = _Loader(self._text)
            return self._loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            origin = f"{self._source}:{mark.line + 1}" if mark else self._source
            raise ConfigError(self._source, [Problem("", ABSENT, _explained(error), origin)]) from error
        except yaml.reader.ReaderError as error:
            fix = f"YAML does not allow the character U+{error.character:04X}; remove it"
            raise ConfigError(self._source, [Problem("", ABSENT, fix)]) from error

    def refused(self, node: yaml.Node, path: FieldPath, value: object, fix: str) -> ConfigError:
        return ConfigError(self._source, [Problem(dotted(path), value, fix, self._origin(node))])

    def value(self, node: yaml.Node, path: FieldPath) -> object:
        self.origins.setdefault(path, self._origin(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            with self._inside(node, path):
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: FieldPath) -> Tree:
        tree: Tree = {}
        with self._inside(node, path):
            for key_node, value_node in node.value:
                key = self._scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
                if not isinstance(key, str):
                    fix = "keys are strings; put the key into quotes"
                    raise self.refused(key_node, path, key_node.value, fix)
                if key in tree:
                    fix = f"duplicate key, first defined at {self.origins[(*path, key)]}; remove one"
                    raise self.refused(key_node, (*path, key), value_node.value, fix)
                self.origins[(*path, key)] = self._origin(key_node)
                tree[key] = self.value(value_node, (*path, key))
        return tree

    @contextmanager
    def _inside(self, node: yaml.Node, path: FieldPath) -> Iterator[None]:
        if any(node is outer for outer in self._around):
            raise self.refused(node, path, ABSENT, "an alias is inside its own value; write the value out")
        self._around.append(node)
        yield
        self._around.pop()

    def _scalar(self, node: yaml.Node, path: FieldPath) -> object:
        try:
            value = self._loader.construct_object(node)
        except (yaml.constructor.ConstructorError, ValueError) as error:
            problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
            raise self.refused(node, path, node.value, f"invalid value: {problem}") from error
        if isinstance(value, str) and (reference := _REFERENCE.search(value)):
            fix = f"references such as {reference[0]} are not supported; write the value"
            self.problems.append(Problem(dotted(path), value, fix, self._origin(node)))
        return value

    def _origin(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}"


def _explained(error: yaml.MarkedYAMLError) -> str:
    problem = str(error.problem)
    if "\\t" in problem:
        return "YAML does not allow tabs here; indent with spaces"
    if problem == "mapping values are not allowed here":
        return "a second `:` or a wrong indent; put the value into quotes, or align the keys"
    context = f"{error.context}, " if error.context else ""
    return f"invalid YAML: {context}{problem}"


def all_of_the_same_variant(path: FieldPath, base: Tree, over: Tree) -> Tree:
    """Nothing if both name their variant, and not the same one; else everything."""
    changes = any(key in base and key in over and base[key] != over[key] for key in VARIANT_KEYS)
    return {} if changes else base


def merged(base: Tree, over: Tree, staying: Staying = all_of_the_same_variant, path: FieldPath = ()) -> Tree:
    """Lay `over` over `base`, without changing either; `path` is theirs in the experiment.

    Mappings merge key by key, after `staying` has selected what remains of the lower one; other values are
    replaced. A mapping of numbers laid over a list (`rewards.0.weight=2`) changes those items.
    """
    below = staying(path, base, over)
    return below | {
        key: _merged_value(below[key], value, staying, (*path, key)) if key in below else value
        for key, value in over.items()
    }


def _merged_value(base: object, over: object, staying: Staying, path: FieldPath) -> object:
    if isinstance(base, dict) and isinstance(over, dict):
        return merged(base, over, staying, path)
    if not (isinstance(base, list) and isinstance(over, dict) and over):
        return over
    if not all(key.isdecimal() and int(key) < len(base) for key in over):
        return over
    return [
        _merged_value(item, over[str(index)], staying, (*path, index)) if str(index) in over else item
        for index, item in enumerate(base)
    ]


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree with their dotted keys; a list, or an empty section, is a value."""
    for key, value in tree.items():
        full = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, full)
        else:
            yield full, value
