"""YAML text to plain Python values, with the line that every value came from.

The scalars are those of YAML 1.2's core schema: `1e-6` is a number and `no` is a text, which YAML 1.1 and
PyYAML's own loaders take for a text and for false.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import yaml

from nemorl.errors import ABSENT, ConfigError, Violation

FieldPath = tuple[str | int, ...]
Tree = dict[str, object]

_TAG = "tag:yaml.org,2002:"


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
    """A mapping of sections and where each of its values came from, as `file:line`."""

    tree: Tree
    origins: dict[FieldPath, str] = field(default_factory=dict)


def dotted(path: FieldPath) -> str:
    """A path as people write it: `rewards.0.weight`."""
    return ".".join(map(str, path))


def field_path(text: str) -> FieldPath:
    """The other way round; a number is a place in a list."""
    return tuple(int(key) if key.isdecimal() else key for key in text.split("."))


def look_up(tree: object, path: FieldPath) -> object:
    """The value at a path. Raises LookupError where there is none."""
    for step in path:
        if isinstance(tree, dict):
            tree = tree[str(step)]
        elif isinstance(tree, list) and isinstance(step, int):
            tree = tree[step]
        else:
            raise LookupError(dotted(path))
    return tree


def parse_document(text: str, source: str) -> Document:
    """Read a YAML mapping; an empty text is an empty one.

    Raises `ConfigError` naming `source` and the line: syntax, tabs, duplicated keys, keys that are not texts,
    unknown tags, anything but a mapping at the top.
    """
    reader = _Reader(text, source)
    root = reader.root()
    if root is None:
        return Document({})
    if not isinstance(root, yaml.MappingNode):
        raise reader.refused(root, (), ABSENT, "sections such as `policy:` are wanted at the top level")
    return Document(reader.mapping(root, ()), reader.origins)


def parse_value(text: str, source: str) -> object:
    """Read one YAML value, such as the right side of `a.b=value`. Raises `ConfigError`."""
    reader = _Reader(text, source)
    root = reader.root()
    return None if root is None else reader.value(root, ())


class _Reader:
    """One text on its way to values. PyYAML parses it; the values are built here to keep their lines."""

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._around: list[yaml.Node] = []  # the collections that stand around the current node
        self.origins: dict[FieldPath, str] = {}

    def root(self) -> yaml.Node | None:
        try:
            self._loader = _Loader(self._text)
            return self._loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            raise ConfigError(
                self._source, [Violation("", ABSENT, _explained(error), self._source + line)]
            ) from error
        except yaml.reader.ReaderError as error:
            mend = f"YAML does not allow the character U+{error.character:04X}: remove it"
            raise ConfigError(self._source, [Violation("", ABSENT, mend)]) from error

    def refused(self, node: yaml.Node, path: FieldPath, value: object, mend: str) -> ConfigError:
        return ConfigError(self._source, [Violation(dotted(path), value, mend, self._origin(node))])

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
                    raise self.refused(
                        key_node, path, key_node.value, "keys are texts: put the key into quotes"
                    )
                if key in tree:
                    first = self.origins[(*path, key)]
                    mend = f"this key stands twice, first at {first}: keep one of them"
                    raise self.refused(key_node, (*path, key), value_node.value, mend)
                self.origins[(*path, key)] = self._origin(key_node)
                tree[key] = self.value(value_node, (*path, key))
        return tree

    @contextmanager
    def _inside(self, node: yaml.Node, path: FieldPath) -> Iterator[None]:
        if any(node is outer for outer in self._around):
            raise self.refused(node, path, ABSENT, "an alias stands inside what it repeats: write it out")
        self._around.append(node)
        yield
        self._around.pop()

    def _scalar(self, node: yaml.Node, path: FieldPath) -> object:
        try:
            return self._loader.construct_object(node)
        except (yaml.constructor.ConstructorError, ValueError) as error:
            problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
            raise self.refused(node, path, node.value, f"this value cannot be read: {problem}") from error

    def _origin(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}"


def _explained(error: yaml.MarkedYAMLError) -> str:
    problem = str(error.problem)
    if "\\t" in problem:
        return "a tab stands where YAML wants spaces: indent with spaces"
    if problem == "mapping values are not allowed here":
        return "a second `:` or a wrong indent: put the value into quotes, or line up the keys"
    context = f"{error.context}, " if error.context else ""
    return f"the YAML is broken: {context}{problem}"
