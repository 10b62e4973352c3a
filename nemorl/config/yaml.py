"""YAML text to plain Python values, with the line that every value came from.

The scalars are those of YAML 1.2's core schema: `1e-6` is a number and `no` is a text, which YAML 1.1 and
PyYAML's own loaders take for a text and for false.

`${a.b}`: a value taken from another place of the experiment.

One tree laid over another: inheritance, command-line overrides, presets.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import yaml

from nemorl.errors import ABSENT, ConfigError, Problem

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
                self._source, [Problem("", ABSENT, _explained(error), self._source + line)]
            ) from error
        except yaml.reader.ReaderError as error:
            fix = f"YAML does not allow the character U+{error.character:04X}: remove it"
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
                    raise self.refused(
                        key_node, path, key_node.value, "keys are texts: put the key into quotes"
                    )
                if key in tree:
                    first = self.origins[(*path, key)]
                    fix = f"this key stands twice, first at {first}: keep one of them"
                    raise self.refused(key_node, (*path, key), value_node.value, fix)
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


# `$${` writes a literal `${`.
_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}")


class _Unresolvable(Exception):
    """The reference names nothing, or leads back to itself."""


def interpolate(document: Document) -> tuple[Document, list[Problem]]:
    """Replace every `${a.b}` by the value at that path; `${rewards.0.weight}` reaches into lists.

    A text that is nothing but one reference becomes the value with its type, a section included; inside a
    longer text the value is written as text. Only what files and overrides say can be referred to, not the
    defaults of fields. A reference that fails stays as it is, and a problem names it.
    """
    resolver = _Resolver(document)
    tree = resolver.everything()
    return Document(tree, document.origins), resolver.problems


class _Resolver:
    def __init__(self, document: Document) -> None:
        self._tree = document.tree
        self._origins = document.origins
        self.problems: list[Problem] = []

    def everything(self) -> Tree:
        tree = self._resolved(self._tree, (), ())
        assert isinstance(tree, dict)
        return tree

    def _resolved(self, value: object, path: FieldPath, chain: tuple[str, ...]) -> object:
        """`chain` are the references that led here."""
        if isinstance(value, dict):
            return {key: self._resolved(item, (*path, key), chain) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolved(item, (*path, index), chain) for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            return self._text(value, chain)
        except _Unresolvable as error:
            if chain:  # told once, where the first reference of the chain stands
                raise
            self.problems.append(Problem(dotted(path), value, str(error), self._origins.get(path, "")))
            return value

    def _text(self, text: str, chain: tuple[str, ...]) -> object:
        whole = _REFERENCE.fullmatch(text)
        if whole and whole[1] is not None:
            return self._referred(whole[1].strip(), chain)
        return _REFERENCE.sub(lambda match: self._inserted(match, chain), text)

    def _inserted(self, match: re.Match[str], chain: tuple[str, ...]) -> str:
        if match[1] is None:
            return "${"
        value = self._referred(match[1].strip(), chain)
        if isinstance(value, dict | list) or value is None:
            raise _Unresolvable(f"`{match[0]}` is no single value, so it cannot stand inside a text")
        return str(value).lower() if isinstance(value, bool) else str(value)

    def _referred(self, name: str, chain: tuple[str, ...]) -> object:
        if name in chain:
            circle = " -> ".join(f"${{{link}}}" for link in (*chain, name))
            raise _Unresolvable(f"the references go in a circle: {circle}; write one of the values out")
        path = field_path(name)
        try:
            value = look_up(self._tree, path)
        except LookupError as error:
            raise _Unresolvable(
                f"`${{{name}}}` names nothing that the file, what it inherits or the command line sets: "
                "set it, or write the value out"
            ) from error
        return self._resolved(value, path, (*chain, name))


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
