"""Filters of trajectories, such as `reward < 0 and stop == "length" and rewards.format == 1`.

    filter     = and-part { "or" and-part }         and-part = not-part { "and" not-part }
    not-part   = "not" not-part | comparison        comparison = operand { operator operand }
    operator   = < | <= | > | >= | == | != | [ "not" ] "in" ( "(" | "[" ) constants ( ")" | "]" )
    operand    = constant | column | "(" filter ")"

Operators compare in a chain as in Python (`0 < reward < 1`). A column of numbers is compared with numbers,
one of texts by `==`, `!=` and `in` with texts, and one of booleans is a condition. A reward whose name is no
identifier is `rewards["its name"]`. Numbers have the precision of their column, so `reward == 0.1` finds what
was written as 0.1; an unknown number (NaN) is equal to none, not even to itself.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nemorl.config.base import did_you_mean

Mask = NDArray[np.bool_]
Kind = Literal["number", "text", "boolean"]
MAX_CHARACTERS, MAX_DEPTH = 4000, 50


class FilterError(Exception):
    """A filter that cannot be applied; `start` and `end` are the characters that are wrong, from 0."""

    def __init__(self, message: str, start: int, end: int, fix: str = "") -> None:
        super().__init__(message)
        self.message, self.start, self.end, self.fix = message, start, end, fix


class Table(Protocol):
    """What a filter is applied to."""

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """Kinds of the columns, by the name that filters use."""

    @property
    def texts(self) -> Mapping[str, Sequence[str]]:
        """The texts that the numbers of a column of texts refer to."""

    def column(self, name: str) -> NDArray[Any]:
        """[rows]"""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Filter:
    """A filter that was parsed for the columns of a table."""

    text: str
    remarks: tuple[str, ...] = ()  # on texts that no row has, which may be misspelled
    _mask: Callable[[Table], Any] | None = None  # None: all rows

    def mask(self, table: Table) -> Mask:
        """[rows] True where it applies."""
        if self._mask is None:
            return np.ones(len(table), np.bool_)
        with np.errstate(over="ignore"):  # a constant beyond the range of float32 is infinite
            return np.broadcast_to(self._mask(table), (len(table),))


def parse_filter(text: str, table: Table) -> Filter:
    """Raises FilterError. An empty text is a filter of all rows."""
    if len(text) > MAX_CHARACTERS:
        raise FilterError(f"longer than {MAX_CHARACTERS} characters", MAX_CHARACTERS, len(text), "shorten it")
    if not text.strip():
        return Filter(text)
    parser = _Parser(text, table)
    mask = parser.parse()
    return Filter(text, tuple(parser.remarks), mask)


class _Token(NamedTuple):
    kind: str  # of _TOKENS, or "end"
    text: str
    start: int
    end: int


_TOKENS = re.compile(
    r"""\s*(?:
      (?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<name>[A-Za-z_]\w*(?:\.\w[\w/-]*)*)
    | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<operator><=|>=|==|!=|<|>)
    | (?P<mark>[()\[\],])
    )""",
    re.VERBOSE,
)
_WORDS = ("and", "or", "not", "in")
_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
_INSTEAD = {"=": "==", "&": "and", "&&": "and", "|": "or", "||": "or", "!": "not", "<>": "!="}


def _tokens(text: str) -> list[_Token]:
    tokens, position = [], 0
    while text[position:].strip():
        match = _TOKENS.match(text, position)
        if match is None or match.lastgroup is None:
            start = position + len(text[position:]) - len(text[position:].lstrip())
            raise _unreadable(text, start)
        kind = match.lastgroup
        tokens.append(_Token(kind, match[kind], match.start(kind), match.end(kind)))
        position = match.end()
    return [*tokens, _Token("end", "", len(text), len(text))]


def _unreadable(text: str, start: int) -> FilterError:
    if text[start] in "\"'":
        return FilterError("the text has no end", start, len(text), f"close it with {text[start]}")
    sign = next((sign for sign in ("&&", "||", *_INSTEAD) if text.startswith(sign, start)), text[start])
    fix = f"write {_INSTEAD[sign]}" if sign in _INSTEAD else "remove it"
    return FilterError(f"{sign} is no part of a filter", start, start + len(sign), fix)


@dataclass(frozen=True)
class _Value:
    """A part of a filter: a constant, a column, or a condition."""

    kind: Kind
    of: Callable[[Table], Any]
    start: int
    end: int
    column: str = ""
    constant: Any = None  # of a constant


class _Parser:
    def __init__(self, text: str, table: Table) -> None:
        self._tokens, self._next, self._depth = _tokens(text), 0, 0
        self._table = table
        self.remarks: list[str] = []

    def parse(self) -> Callable[[Table], Any]:
        whole = self._condition(self._any())
        if (rest := self._peek).kind != "end":
            raise self._unexpected(rest, "and, or, or the end")
        return whole.of

    @property
    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, *texts: str) -> _Token | None:
        """The next token, if it is one of these words or marks."""
        token = self._peek
        if token.kind in ("string", "end") or token.text not in texts:
            return None
        self._next += 1
        return token

    def _any(self) -> _Value:
        return self._joined("or", np.logical_or, lambda: self._joined("and", np.logical_and, self._negated))

    def _joined(self, word: str, join: Callable[[Any, Any], Any], part: Callable[[], _Value]) -> _Value:
        left = part()
        while self._take(word):
            one, other = self._condition(left), self._condition(part())
            left = _Value("boolean", _both(join, one, other), one.start, other.end)
        return left

    def _negated(self) -> _Value:
        if (word := self._take("not")) is None:
            return self._comparison()
        with_depth = self._deeper(word)
        inner = self._condition(self._negated())
        self._depth = with_depth
        return _Value("boolean", lambda table: np.logical_not(inner.of(table)), word.start, inner.end)

    def _deeper(self, token: _Token) -> int:
        before, self._depth = self._depth, self._depth + 1
        if self._depth > MAX_DEPTH:
            raise FilterError(f"more than {MAX_DEPTH} levels", token.start, token.end, "simplify the filter")
        return before

    def _comparison(self) -> _Value:
        left = self._operand()
        links: list[_Value] = []
        while True:
            token = self._peek
            if token.kind == "operator":
                self._next += 1
                right = self._operand()
                links.append(self._compared(left, token, right))
                left = right
            elif token.text in ("in", "not") and token.kind == "name" and not links:
                return self._contained(left)
            else:
                break
        if not links:
            return left
        whole = links[0]
        for link in links[1:]:
            whole = _Value("boolean", _both(np.logical_and, whole, link), whole.start, link.end)
        return whole

    def _operand(self) -> _Value:
        token = self._peek
        if opening := self._take("("):
            before = self._deeper(opening)
            inner = self._any()
            self._depth = before
            if self._take(")") is None:
                raise self._unexpected(self._peek, ") for the ( of column " + str(opening.start + 1))
            return inner
        if token.kind == "name" and token.text not in (*_WORDS, *_BOOLEANS):
            return self._column()
        return self._constant("a column, a number, a text, not or (")

    def _constant(self, expected: str) -> _Value:
        token = self._peek
        kind: Kind
        constant: Any
        if token.kind == "number":
            kind, constant = "number", _number(token.text)
        elif token.kind == "string":
            kind, constant = "text", re.sub(r"\\(.)", r"\1", token.text[1:-1])
        elif token.text in _BOOLEANS:
            kind, constant = "boolean", _BOOLEANS[token.text]
        else:
            raise self._unexpected(token, expected)
        self._next += 1
        return _Value(kind, lambda _: constant, token.start, token.end, constant=constant)

    def _column(self) -> _Value:
        token = self._peek
        self._next += 1
        name, end = token.text, token.end
        if name == "rewards" and self._take("["):
            of_name = self._constant("the name of a reward in quotes")
            if of_name.kind != "text" or (closing := self._take("]")) is None:
                raise self._unexpected(self._peek, '["the name of a reward"]')
            name, end = f"rewards.{of_name.constant}", closing.end
        kinds = self._table.kinds
        if name not in kinds:
            fix = did_you_mean(name, list(kinds)).rstrip() or f"there are {', '.join(kinds)}"
            raise FilterError(f"no column {name}", token.start, end, fix)
        return _Value(kinds[name], lambda table: table.column(name), token.start, end, name)

    def _compared(self, left: _Value, operator: _Token, right: _Value) -> _Value:
        if left.kind != right.kind:
            fix = _example(left if left.column else right)
            problem = f"{_described(left)} is compared with {_described(right)}"
            raise FilterError(problem, left.start, right.end, fix)
        if left.kind != "number" and operator.text not in ("==", "!="):
            problem = f"{operator.text} is for numbers, and {_described(left)} is compared"
            raise FilterError(problem, operator.start, operator.end, "use == or !=")
        compare = _COMPARE[operator.text]
        if left.kind == "text":
            return self._compared_texts(left, compare, right)
        return _Value("boolean", _both(compare, left, right), left.start, right.end)

    def _compared_texts(self, left: _Value, compare: Callable[[Any, Any], Any], right: _Value) -> _Value:
        """A column with a constant by the constant's number; others by the texts themselves."""
        column, other = (left, right) if left.column else (right, left)
        if column.column and not other.column:
            number = self._number_of(column.column, other)
            return _Value("boolean", lambda t: compare(column.of(t), number), left.start, right.end)

        def texts(value: _Value, table: Table) -> Any:
            known = np.array([*table.texts[value.column], ""]) if value.column else None
            return value.constant if known is None else known[value.of(table)]

        def mask(table: Table) -> Any:
            return compare(texts(left, table), texts(right, table))

        return _Value("boolean", mask, left.start, right.end)

    def _contained(self, left: _Value) -> _Value:
        negated = self._take("not") is not None
        word = self._take("in")
        opening = None if word is None else self._take("(", "[")
        if opening is None:
            raise self._unexpected(self._peek, "in" if word is None else '( and constants, such as ("stop")')
        closing = ")" if opening.text == "(" else "]"
        values: list[_Value] = []
        while (end := self._take(closing)) is None:
            values.append(self._constant("a constant"))
            if self._take(",") is None and self._peek.text != closing:
                raise self._unexpected(self._peek, f", or {closing}")
        for value in values:
            if value.kind != left.kind:
                problem = f"{_described(value)} is compared with {_described(left)}"
                raise FilterError(problem, value.start, value.end, _example(left))
        if left.kind == "text" and left.column:
            among: list[Any] = [self._number_of(left.column, value) for value in values]
        else:
            among = [value.constant for value in values]

        def mask(table: Table) -> Any:
            value, found = left.of(table), np.False_
            for each in among:
                found = np.logical_or(found, np.equal(value, each))
            return np.logical_not(found) if negated else found

        return _Value("boolean", mask, left.start, end.end)

    def _number_of(self, column: str, constant: _Value) -> int:
        """The number of a text in a column; -1 where no row has it."""
        known = list(self._table.texts[column])
        if constant.constant in known:
            return known.index(constant.constant)
        hint = did_you_mean(constant.constant, known).rstrip() or f"there are {', '.join(map(repr, known))}"
        self.remarks.append(f"no row has {column} {constant.constant!r}; {hint}")
        return -1

    def _condition(self, value: _Value) -> _Value:
        if value.kind != "boolean":
            problem = f"{_described(value)} is no condition"
            raise FilterError(problem, value.start, value.end, _example(value))
        return value

    def _unexpected(self, token: _Token, expected: str) -> FilterError:
        what = "the end" if token.kind == "end" else token.text
        return FilterError(f"expected {expected}, found {what}", token.start, max(token.end, token.start + 1))


def _both(join: Callable[[Any, Any], Any], one: _Value, other: _Value) -> Callable[[Table], Any]:
    return lambda table: join(one.of(table), other.of(table))


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _described(value: _Value) -> str:
    kind = "a condition" if value.kind == "boolean" and not value.column else f"a {value.kind}"
    subject = value.column or (repr(value.constant) if value.constant is not None else "")
    return f"{subject} ({kind})" if subject else kind


def _example(value: _Value) -> str:
    if not value.column:
        return "compare it with a column"
    constant = {"number": "0", "text": '"…"', "boolean": "true"}[value.kind]
    return f"write, for example, {value.column} == {constant}"
