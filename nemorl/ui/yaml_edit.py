"""Edits of the text of an experiment file that change the lines of one value only.

The parser's events give the position of each value, and an edit replaces, inserts or removes characters
there: comments, order, quotes and anchors elsewhere stay as they are. Every edit is verified: the new text is
read again, and must give the tree that the edit means.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import yaml

from nemorl.config.yaml import FieldPath, Tree, dotted, parse_document, parse_value
from nemorl.errors import ConfigError

_INDENT = 2
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")  # an anchor and a tag before a value
# A text without quotes: it begins with a letter, and has nothing that YAML gives a meaning.
_PLAIN = re.compile(r"[A-Za-z_./][\w./+@%()=-]*(?:[ :][\w./+@%()=-]+)*")
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})  # also of YAML 1.1


class EditError(Exception):
    """Why a value cannot be edited, with the line and what to do."""


@dataclass
class _Node:
    """A value of the text, between two positions; `end` is behind its last character."""

    kind: str  # scalar, mapping, sequence, alias
    start: int
    end: int
    column: int
    is_flow: bool = False
    kept_end: int | None = None  # of a text in lines that keeps its blank lines, behind these
    anchor: str | None = None  # its own, or, of an alias, that to which it refers
    entries: "list[tuple[_Node, _Node]]" = field(default_factory=list)  # keys and values of a mapping
    items: "list[_Node]" = field(default_factory=list)
    text: str = ""  # of a scalar

    def child(self, key: str | int) -> "_Node | None":
        if isinstance(key, int):
            return self.items[key] if self.kind == "sequence" and key < len(self.items) else None
        return next((value for name, value in self.entries if name.text == key), None)

    def below(self) -> "Iterator[_Node]":
        yield self
        for key, value in self.entries:
            yield from (key, *value.below())
        for item in self.items:
            yield from item.below()


def set_value(text: str, path: FieldPath, value: object, order: Sequence[str] = ()) -> str:
    """Write a value, with the sections around it that are missing; a new key comes where `order` has it.

    Raises `ConfigError` for a text that is no experiment file, and `EditError`.
    """
    tree = parse_document(text, "the text").tree
    expected = deepcopy(tree)
    _put(expected, path, value)
    return text if expected == tree else _verified(_Editor(text).set(path, value, order), expected, path)


def append(text: str, path: FieldPath, value: object) -> str:
    """Add an item to a list, which may be missing. Raises `ConfigError` and `EditError`."""
    tree = parse_document(text, "the text").tree
    found = _value_at(tree, path)
    if not isinstance(found, list) or not found:
        return set_value(text, path, [value])
    expected = deepcopy(tree)
    _value_at(expected, path).append(value)
    return _verified(_Editor(text).append(path, value), expected, path)


def remove(text: str, path: FieldPath) -> str:
    """Remove a field or an item of a list, and sections that become empty. Without it the text is unchanged.

    An empty list stays. Raises `ConfigError` and `EditError`.
    """
    tree = parse_document(text, "the text").tree
    while len(path) > 1 and isinstance(path[-2], str) and _is_only_key(tree, path):
        path = path[:-1]
    around = _value_at(tree, path[:-1])
    if isinstance(around, list) and len(around) == 1 and path[-1] == 0:
        return set_value(text, path[:-1], [])
    if _is_only_key(tree, path) and len(path) > 1:  # of an item of a list
        return set_value(text, path[:-1], {})
    expected = deepcopy(tree)
    try:
        del _value_at(expected, path[:-1])[path[-1]]
    except (LookupError, TypeError):
        return text
    return _verified(_Editor(text).remove(path), expected, path)


def _is_only_key(tree: Tree, path: FieldPath) -> bool:
    around = _value_at(tree, path[:-1])
    return isinstance(around, dict) and list(around) == [path[-1]]


def _value_at(tree: Any, path: FieldPath) -> Any:
    for step in path:
        try:
            tree = tree[step]
        except (LookupError, TypeError):
            return None
    return tree


def _put(tree: Any, path: FieldPath, value: object) -> None:
    *around, last = path
    for index, step in enumerate(around):
        if isinstance(step, int) and not (isinstance(tree, list) and step < len(tree)):
            raise EditError(f"{dotted(path[: index + 1])} does not exist; append to the list instead")
        if isinstance(step, str) and tree.get(step) is None:
            tree[step] = {}
        tree = tree[step]
        following = path[index + 1]
        if not isinstance(tree, list if isinstance(following, int) else dict):
            kind = "list" if isinstance(following, int) else "section"
            raise EditError(f"{dotted(path[: index + 1])} is no {kind}; correct it in the text")
    if isinstance(tree, list) and not (isinstance(last, int) and last < len(tree)):
        raise EditError(f"{dotted(path)} does not exist; append to the list instead")
    tree[last] = value


def _verified(text: str, expected: Tree, path: FieldPath) -> str:
    try:
        if parse_document(text, "the text").tree == expected:
            return text
    except ConfigError:
        pass
    raise EditError(f"{dotted(path)} is written in a form that cannot be edited here; edit the text")


def dump_inline(value: object) -> str:
    """A value in one line, as YAML 1.2 and 1.1 read it."""
    match value:
        case dict():
            return (
                "{" + ", ".join(f"{_scalar(key)}: {dump_inline(item)}" for key, item in value.items()) + "}"
            )
        case list() | tuple():
            return "[" + ", ".join(map(dump_inline, value)) + "]"
        case _:
            return _scalar(value)


def _scalar(value: object) -> str:
    if isinstance(value, float):
        number = json.dumps(value).replace("-Infinity", "-.inf").replace("Infinity", ".inf")
        return re.sub(r"e([+-]?)0*(\d)", r"e\1\2", number.replace("NaN", ".nan"))
    if not isinstance(value, str):
        return json.dumps(value)
    if value.isprintable() and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        try:
            if parse_value(value, "", ()) == value:
                return value
        except ConfigError:
            pass
    # Of the escapes of JSON, YAML lacks pairs of surrogates; other characters stay.
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def dump_block(value: object) -> list[str]:
    """The lines of a mapping."""
    return _block(value, 0)


def _block(value: object, indent: int) -> list[str]:
    """The lines of a mapping, or of a list with mappings, indented."""
    space, lines = " " * indent, []
    if isinstance(value, dict):
        for key, item in value.items():
            if _has_lines(item):
                lines += [f"{space}{_scalar(key)}:", *_block(item, indent + _INDENT)]
            else:
                lines.append(f"{space}{_scalar(key)}: {dump_inline(item)}")
    elif isinstance(value, list | tuple):
        for item in value:
            if _has_lines(item):
                first, *rest = _block(item, indent + 2)
                lines += [f"{space}- {first.lstrip(' ')}", *rest]
            else:
                lines.append(f"{space}- {dump_inline(item)}")
    return lines


def _has_lines(value: object) -> bool:
    if isinstance(value, dict):
        return len(value) > 0
    return isinstance(value, list | tuple) and any(isinstance(item, dict) and item for item in value)


def _position(mark: Any) -> tuple[int, int]:
    """The index and the column of a mark."""
    return mark.index, mark.column


class _Editor:
    """One edit of one text, which is valid."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._newline = "\r\n" if "\r\n" in text else "\n"
        tokens = list(yaml.scan(text, Loader=yaml.SafeLoader))
        self._dashes: list[int] = [t.start_mark.index for t in tokens if isinstance(t, yaml.BlockEntryToken)]
        self._colons: list[int] = [t.end_mark.index for t in tokens if isinstance(t, yaml.ValueToken)]
        events = iter(list(yaml.parse(text, Loader=yaml.SafeLoader)))
        self._root: _Node | None = None
        for event in events:
            if isinstance(event, yaml.NodeEvent):
                self._root = self._read(event, events)
                break
        nodes = list(self._root.below()) if self._root else []
        self._referenced = {node.anchor: node for node in nodes if node.kind == "alias"}

    def _read(self, event: yaml.NodeEvent, events: Iterator[yaml.Event]) -> _Node:
        (start, column), (end, _) = _position(event.start_mark), _position(event.end_mark)
        if isinstance(event, yaml.AliasEvent):
            return _Node("alias", start, end, column, anchor=event.anchor)
        if isinstance(event, yaml.ScalarEvent):
            node = _Node("scalar", start, end, column, text=event.value)
            if event.style in ("|", ">"):  # which ends before the next value
                node.end = start + len(self._text[start:end].rstrip())
                header = self._text[start:end].partition("\n")[0]
                node.kept_end = end if "+" in header.partition("#")[0] else None
        else:
            kind = "mapping" if isinstance(event, yaml.MappingStartEvent) else "sequence"
            node = _Node(kind, start, end, column, is_flow=bool(getattr(event, "flow_style", False)))
            for following in events:
                if isinstance(following, yaml.CollectionEndEvent):
                    end = _position(following.end_mark)[0]
                    break
                assert isinstance(following, yaml.NodeEvent)
                child = self._read(following, events)
                if kind == "sequence":
                    node.items.append(child)
                else:
                    value = next(events)
                    assert isinstance(value, yaml.NodeEvent)
                    node.entries.append((child, self._read(value, events)))
            children = [*node.items, *(value for _, value in node.entries)]
            node.end = end if node.is_flow else children[-1].end
            first = node.items[0] if node.items else node.entries[0][0] if node.entries else node
            node.column = first.column
        node.anchor = event.anchor
        return node

    def set(self, path: FieldPath, value: object, order: Sequence[str] = ()) -> str:
        node, rest = self._deepest(path)
        if node is None:
            return self._at_end(_block(self._nested(rest, value), 0))
        if not rest:
            return self._replace(node, value, self._around(path))
        if node.kind == "mapping" and (node.entries or node.is_flow):
            key, *further = rest
            return self._insert(node, str(key), self._nested(tuple(further), value), order)
        # A null, an alias or an empty list in the place of a section.
        done = path[: len(path) - len(rest)]
        return self._replace(node, self._with(done, rest, value), self._around(done))

    def append(self, path: FieldPath, value: object) -> str:
        node, rest = self._deepest(path)
        if node is None or rest or node.kind == "alias":
            tree = parse_document(self._text, "").tree
            return self.set(path, [*_value_at(tree, path), value])
        self._refuse_shared(node, path)
        last = node.items[-1]
        if node.is_flow:
            return self._splice(last.end, last.end, f", {dump_inline(value)}")
        return self._insert_lines(last, _block([value], self._column(self._dash(last))))

    def remove(self, path: FieldPath) -> str:
        node, rest = self._deepest(path)
        around = self._around(path)
        assert node is not None
        assert around is not None
        if rest or around.kind == "alias":  # the value is that of an alias
            done = path[: len(path) - len(rest)]
            tree = deepcopy(_value_at(parse_document(self._text, "").tree, done))
            del _value_at(tree, rest[:-1])[rest[-1]]
            return self._replace(node, tree, self._around(done))
        self._refuse_shared(node, path)
        if around.kind == "mapping":
            places = [(key.start, value) for key, value in around.entries]
        else:
            places = [(item.start if around.is_flow else self._dash(item), item) for item in around.items]
        index = next(i for i, (_, value) in enumerate(places) if value is node)
        start, following = places[index][0], places[index + 1][0] if index + 1 < len(places) else None
        if around.is_flow:
            if index:
                return self._splice(places[index - 1][1].end, node.end, "")
            return self._splice(start, node.end if following is None else following, "")
        line_start = self._text.rfind("\n", 0, start) + 1
        if not self._text[line_start:start].strip(" "):
            return self._splice(line_start, self._line_end(node, with_break=True), "")
        if following is None:  # in a line with the dash of the item that it is in
            return self._splice(start, self._line_end(node), "{}")
        gap = self._text[self._line_end(node) : following]
        return self._splice(start, self._line_end(node) if gap.strip() else following, "")

    def _deepest(self, path: FieldPath) -> tuple[_Node | None, FieldPath]:
        """The deepest value on the way to a path, and the rest of the path."""
        node = self._root
        if node is not None and node.kind == "scalar":  # a null: the text has comments only
            node = None
        for index, step in enumerate(path):
            child = node.child(step) if node is not None else None
            if child is None:
                return node, path[index:]
            node = child
        return node, ()

    def _around(self, path: FieldPath) -> _Node | None:
        return self._deepest(path[:-1])[0] if path else None

    def _nested(self, path: FieldPath, value: object) -> Any:
        for step in reversed(path):
            value = {step: value}
        return value

    def _with(self, done: FieldPath, rest: FieldPath, value: object) -> Any:
        """What is at `done`, with a value at `rest` below it."""
        whole = {"value": deepcopy(_value_at(parse_document(self._text, "").tree, done))}
        _put(whole, ("value", *rest), value)
        return whole["value"]

    def _replace(self, node: _Node, value: object, around: _Node | None) -> str:
        self._refuse_shared(node, ())
        in_flow = around is not None and around.is_flow
        start = node.start
        if node.kind != "alias" and (found := _PROPERTIES.match(self._text, start)):
            start = min(found.end(), node.end)
        end = node.end
        column = 0
        if around is not None and around.kind == "mapping":
            column = around.column
        elif around is not None and around.items:
            column = around.items[0].column
        if node.kind in ("mapping", "sequence") and not node.is_flow:
            return self._replace_block(node, start, value, column, around)
        own_lines = not in_flow and _has_lines(value) and around is not None and around.kind == "mapping"
        if own_lines and not _PROPERTIES.match(self._text, node.start).group():  # type: ignore[union-attr]
            # The comment behind the old value stays in the line of the key.
            line_end = end if node.kept_end else self._line_end(node)
            rest = self._text[end:line_end].rstrip()
            lines = self._newline.join(_block(value, column + _INDENT))
            return self._splice(self._colon(node), line_end, f"{rest}{self._newline}{lines}")
        new = dump_inline(value)
        before = self._text[start - 1 : start]
        return self._splice(start, end, new if before in ("", " ", "\n", "[", "{", "\t") else f" {new}")

    def _replace_block(
        self, node: _Node, start: int, value: object, column: int, around: _Node | None
    ) -> str:
        """Replace a value that has its own lines."""
        line_start = self._text.rfind("\n", 0, start) + 1
        is_alone = not self._text[line_start:start].strip(" ")
        if around is not None and around.kind == "mapping" and is_alone:
            if _has_lines(value):
                # A list may have the column of its key, a section not.
                indent = self._column(start)
                indent = max(indent, column + _INDENT) if isinstance(value, dict) else indent
                lines = self._newline.join(_block(value, indent))
                return self._splice(line_start, node.end, lines)
            colon, new = self._colon(node), f" {dump_inline(value)}"
            kept = self._text[colon:line_start]  # comments between the key and its value
            stop = self._line_end(node, with_break=True)
            return self._text[:colon] + new + kept + self._text[stop:]
        if _has_lines(value):
            first, *rest = _block(value, self._column(start))
            return self._splice(start, node.end, self._newline.join([first.lstrip(" "), *rest]))
        return self._splice(start, node.end, dump_inline(value))

    def _insert(self, node: _Node, key: str, value: object, order: Sequence[str]) -> str:
        """Add a key to a mapping, behind the last of its keys that `order` has before it."""
        self._refuse_shared(node, (key,))
        if node.is_flow:
            new = f"{_scalar(key)}: {dump_inline(value)}"
            if not node.entries:
                inside = self._text.index("{", node.start) + 1
                return self._splice(inside, inside, new)
            last = node.entries[-1][1]
            at = last.end
            return self._splice(at, at, f", {new}")
        earlier = set(order[: order.index(key)]) if key in order else set()
        behind = [one for name, one in node.entries if name.text in earlier]
        return self._insert_lines(
            (behind or [one for _, one in node.entries])[-1], _block({key: value}, node.column)
        )

    def _insert_lines(self, after: _Node, lines: Sequence[str]) -> str:
        at = self._line_end(after)
        new = self._newline.join(lines)
        if at and self._text[at - 1] == "\n":  # behind a block of text, which ends with its line
            return self._splice(at, at, new + self._newline)
        return self._splice(at, at, self._newline + new)

    def _at_end(self, lines: Sequence[str]) -> str:
        text = self._text
        if text and not text.endswith("\n"):
            text += self._newline
        return text + self._newline.join(lines) + self._newline

    def _refuse_shared(self, node: _Node, path: FieldPath) -> None:
        """A value that aliases elsewhere repeat would change there too."""
        nodes = set(map(id, node.below()))
        for one in self._root.below() if self._root else ():
            shared = one.anchor is not None and one.kind != "alias" and one.anchor in self._referenced
            if shared and (id(one) in nodes or any(below is node for below in one.below())):
                alias = self._referenced[one.anchor]
                line = self._text.count("\n", 0, alias.start) + 1
                where = f"line {line} repeats it as *{one.anchor}"
                raise EditError(f"{dotted(path)}: {where}; edit the text".removeprefix(": "))

    def _colon(self, value: _Node) -> int:
        """The position behind the colon before a value."""
        return self._colons[bisect_left(self._colons, value.start + 1) - 1]

    def _dash(self, item: _Node) -> int:
        return self._dashes[bisect_left(self._dashes, item.start) - 1]

    def _column(self, position: int) -> int:
        return position - (self._text.rfind("\n", 0, position) + 1)

    def _line_end(self, node: _Node, *, with_break: bool = False) -> int:
        """The end of the line in which a value ends: with its comment, and on request its line break."""
        end, last = node.end, node
        while last.entries or last.items:
            last = last.items[-1] if last.items else last.entries[-1][1]
        if last.kept_end is not None:
            return last.kept_end
        found = self._text.find("\n", end)
        if found < 0:
            return len(self._text)
        if with_break:
            return found + 1
        return found - 1 if self._text[found - 1 : found] == "\r" and found > end else found

    def _splice(self, start: int, end: int, new: str) -> str:
        return self._text[:start] + new + self._text[end:]


def edit(text: str, edits: Sequence[Mapping[str, Any]], order: Sequence[str] = ()) -> str:
    """Apply edits in sequence: `{"path": […], "value": …}` sets, with `"append": true` appends, and with
    `"remove": true` removes. `order` is that of new sections.

    Raises `ConfigError` and `EditError`.
    """
    for one in edits:
        path: FieldPath = tuple(one["path"])
        if one.get("remove"):
            text = remove(text, path)
        elif one.get("append"):
            text = append(text, path, one.get("value"))
        else:
            text = set_value(text, path, one.get("value"), order)
    return text
