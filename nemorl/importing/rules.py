"""Rules that turn the keys of another project's config into fields of an experiment, and what became of each.

An origin's module is a table of rules. Each key of a config has to match one, or it is reported as unknown:

    Part     fields of ours that follow from these keys
    Lost     no counterpart, and the result changes unless the value is a neutral one
    Ignored  no counterpart, and the result does not change
"""

import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from nemorl.config.base import did_you_mean
from nemorl.errors import UsageError

_MISSPELLED = 0.8  # of a value, by difflib: `gdpo` is not a misspelling of `grpo`, `grppo` is
_SIMILAR = 0.92  # of two names, by difflib: `critc_warmup` is a misspelling of `critic_warmup`
_ASKS_FOR_ROWS = "--rows"
_COMMAND = re.compile(r"\$\(|`")  # of a shell
WRONG_TYPE = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)  # raised by rules

Outcome = Literal["mapped", "changed", "none", "unknown"]
Fields = Mapping[str, Any]  # values of an experiment by the paths of their fields


class CannotImport(UsageError):
    """A config of something that nemorl does not have, or that it cannot reproduce; every problem of it."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def not_imported(key: str, value: object, kind: str, known: Iterable[str]) -> CannotImport:
    """The error for a value, such as a loss, that none of the `known` ones is."""
    names = list(known)
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=_MISSPELLED)
    asks = f"did you mean `{close[0]}`? " if close else ""
    return CannotImport(
        f"{key} = {value}: {asks}this {kind} is not imported; those that are: {', '.join(names)}"
    )


@dataclass(frozen=True)
class Options:
    """What the command line adds to a config."""

    rows: int | None = None  # of the training data, where the run's length is given in epochs
    folder: str = "."  # of the config, from which paths of prompt files may be relative
    template: str | None = None  # file for a chat template that the config has as text; None writes none
    trainer: str | None = None  # of TRL, where the keys fit several


@dataclass(frozen=True)
class Row:
    """What became of one key."""

    key: str
    value: object
    outcome: Outcome
    fields: tuple[str, ...] = ()  # of the experiment
    note: str = ""  # how the meaning changed, or why there is no counterpart
    changes_result: bool = False


class Origin:
    """The values of a config by their dotted keys; rules leave remarks on keys here."""

    def __init__(
        self,
        values: Mapping[str, Any],
        options: Options | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """`defaults` are the project's, of keys that the config does not have."""
        self.values, self.options, self.defaults = values, options or Options(), defaults or {}
        self.remarks: dict[str, tuple[str, bool]] = {}  # of a changed meaning, and if the result changes
        self.losses: dict[str, tuple[str, bool]] = {}
        self.unused: dict[str, str] = {}  # sections, with the reason
        self.files: dict[str, str] = {}  # texts to write next to the experiment, by path
        self.comments: dict[str, str] = {}  # on values that the config does not have

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the project's default; the default given here where that is absent or null.

        Raises CannotImport if a default is known and the value is of another type: text, a list and a section
        are not distinguished, as many keys take several of them.
        """
        value = self.values[key] if key in self.values else self.defaults.get(key)
        if value is None:
            return default
        likeness = self.defaults.get(key)
        return _as_type_of(default if likeness is None else likeness, value, key)

    def below(self, section: str) -> dict[str, Any]:
        """The values of a section as a tree."""
        start, tree = f"{section}.", dict[str, Any]()
        for key, value in self.values.items():
            if key.startswith(start):
                place(tree, key.removeprefix(start), value)
        return tree

    def has_section(self, name: str) -> bool:
        return name in self._sections

    @cached_property
    def _sections(self) -> frozenset[str]:
        parents = (itertools.accumulate(key.split(".")[:-1], "{}.{}".format) for key in self.values)
        return frozenset(itertools.chain.from_iterable(parents))

    def note(self, value: str, text: str) -> None:
        """Write a comment where the experiment has a value that the config does not have, such as a path."""
        self.comments[value] = text

    def changed(self, key: str, how: str, *, changes_result: bool = True) -> None:
        """The key is mapped to something that differs."""
        self.remarks[key] = how, changes_result

    def lost(self, key: str, why: str, *, changes_result: bool = True) -> None:
        """The value of the key has no counterpart."""
        self.losses[key] = why, changes_result

    def skip(self, section: str, why: str) -> None:
        """Nothing uses a section of the config."""
        self.unused[section] = why


@dataclass(frozen=True)
class Part:
    keys: tuple[str, ...]
    fields: tuple[str, ...]
    write: Callable[[Origin], Fields]
    note: str = ""  # how the meaning changes, whatever the value is


@dataclass(frozen=True)
class Lost:
    keys: tuple[str, ...]
    why: str
    neutral: tuple[object, ...] = (None, False)  # values that do nothing


@dataclass(frozen=True)
class Ignored:
    keys: tuple[str, ...]
    why: str


Rule = Part | Lost | Ignored


def take(key: str, path: str, convert: Callable[[Any], Any] | None = None, note: str = "") -> Part:
    """A rule: the value of the key, converted if it is not null, is that of the field at the path."""

    def write(x: Origin) -> Fields:
        if key not in x.values:
            return {}
        value = x.values[key]
        return {path: value if convert is None or value is None else convert(value)}

    return Part((key,), (path,), write, note)


def take_given(key: str, path: str, convert: Callable[[Any], Any] | None = None) -> Part:
    """The same, but null leaves the field at its default."""
    rule = take(key, path, convert)
    return Part((key,), (path,), lambda x: rule.write(x) if x.values.get(key) is not None else {})


@dataclass(frozen=True)
class Imported:
    tree: dict[str, Any]  # the experiment, as in a file
    rows: tuple[Row, ...]
    sources: dict[str, list[str]] = field(default_factory=dict)  # keys that each section comes from
    files: dict[str, str] = field(default_factory=dict)  # texts that the experiment names, by path
    comments: dict[str, str] = field(default_factory=dict)  # on values that are to be replaced
    keys_of_fields: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of the origin, given or not

    def count(self, outcome: Outcome, *, changes_result: bool | None = None) -> int:
        return sum(
            row.outcome == outcome and changes_result in (None, row.changes_result) for row in self.rows
        )


def apply(
    rules: Sequence[Rule],
    origin: Origin,
    *,
    with_rows: bool = True,
    likenesses: Mapping[str, object] = MappingProxyType({}),
) -> Imported:
    """Apply all rules to a config, and report on its keys.

    `likenesses` has a value of the right type for a key, or all of its values as a tuple, of keys that are
    not read in every config. Raises CannotImport with every problem, unknown keys included.
    """
    problems: list[str] = []
    for key, likeness in likenesses.items():
        given = origin.values.get(key)
        if given is not None and not _is_unset(given):
            with _listing(problems):
                _as_type_of(likeness, given, key)
    index = RuleIndex(rules)
    problems += [
        f"{key} = {value}: expected a section; correct it, or leave it out"
        for key, value in origin.values.items()
        if isinstance(value, int | float | str) and value and not _is_unset(value) and index.is_section(key)
    ]
    tree: dict[str, Any] = {}
    sources: dict[str, list[str]] = {}
    keys_of_fields: dict[str, tuple[str, ...]] = {}
    for rule in rules:
        if isinstance(rule, Part):
            keys_of_fields |= {path: rule.keys for path in rule.fields if path not in keys_of_fields}
            # What a rule makes of a value that is refused already says nothing new.
            if any(_names(problems, key) for key in rule.keys):
                continue
            with _listing(problems):
                try:
                    fields = written(rule, origin)
                except WRONG_TYPE as error:
                    wrong = _wrong_values(rule, origin)
                    if any(_names(problems, key) for key in wrong) or (problems and not wrong):
                        continue
                    read = {key: origin.values[key] for key in rule.keys if key in origin.values}
                    listed = ", ".join(f"{key} = {value}" for key, value in (wrong or read).items())
                    problem = "expected a value of the type that the key has there; correct it"
                    raise CannotImport(f"{listed or rule.keys[0]}: {problem}") from error
                for path, value in fields.items():
                    place(tree, path, value)
                    known = sources.setdefault(path.partition(".")[0], [])
                    known += [key for key in rule.keys if key in origin.values and key not in known]
    values = sorted(origin.values.items()) if with_rows else ()
    rows = tuple(_row(key, value, index, origin) for key, value in values)
    if problems:
        for key, given in origin.values.items():  # those that no rule came to
            if not _is_unset(given):
                with _listing(problems):
                    origin.get(key)
        problems.sort(key=lambda problem: _ASKS_FOR_ROWS in problem)  # the rest may be all that is wrong
        unknown = [f"{row.key}: unknown key; {row.note}" for row in rows if row.outcome == "unknown"]
        raise CannotImport(*problems, *unknown)
    return Imported(tree, rows, sources, origin.files, origin.comments, keys_of_fields)


def _is_unset(value: object) -> bool:
    """True for a variable that a script does not set."""
    return str(value).startswith("$")


def _names(problems: list[str], key: str) -> bool:
    """True if a problem is of this key."""
    return any(problem.startswith((f"{key} = ", f"{key}: ")) for problem in problems)


@contextmanager
def _listing(problems: list[str]) -> Iterator[None]:
    """Add what is refused to the problems, once."""
    try:
        yield
    except CannotImport as error:
        problems += [problem for problem in error.problems if problem not in problems]


def written(rule: Part, origin: Origin) -> Fields:
    """The fields of a rule. Raises one of WRONG_TYPE where a value is not what the rule reads."""
    for key in rule.keys:
        if isinstance(value := origin.values.get(key), str) and _COMMAND.search(value):
            raise CannotImport(f"{key} = {value}: nothing is executed; write what the command prints there")
    return rule.write(origin)


def _wrong_values(rule: Part, origin: Origin) -> dict[str, Any]:
    """Values without which the rule does not fail, or fails in another way, of all keys; switches last."""
    rest, found = dict(origin.values), dict[str, Any]()
    while (failure := _failure(rule, origin, rest)) is not None:
        cures = {
            key: value
            for key, value in rest.items()
            if _failure(rule, origin, {other: rest[other] for other in rest if other != key}) != failure
        }
        if not cures:
            break
        found |= {key: value for key, value in cures.items() if not isinstance(value, bool)} or cures
        rest = {key: value for key, value in rest.items() if key not in found}
    return found


def _failure(rule: Part, origin: Origin, values: Mapping[str, Any]) -> str | None:
    try:
        rule.write(Origin(values, origin.options, origin.defaults))
    except WRONG_TYPE as error:
        return repr(error)
    except CannotImport:
        pass
    return None


def _as_type_of(likeness: object, value: Any, key: str) -> Any:
    """The value, as a number if it is the text of one. Raises CannotImport for another type."""
    close = ""
    match likeness:
        case bool():
            if isinstance(value, bool):
                return value
            expected = "true or false"
        case int() | float():
            try:
                number = value if isinstance(value, int | float) else float(value)
            except (TypeError, ValueError):
                number = None
            is_whole = isinstance(likeness, float) or (number is not None and number % 1 == 0)
            if number is not None and is_whole and not isinstance(value, bool):
                return int(number) if isinstance(likeness, int) else number
            expected = "a number" if isinstance(likeness, float) else "an integer"
        case tuple():
            if value in likeness:
                return value
            names = list(map(str, likeness))
            expected = f"one of {', '.join(names)}"
            close = did_you_mean(str(value), names)
        case list():
            if isinstance(value, list):
                return value
            expected = "a list"
        case str():
            if not isinstance(value, dict):
                return value
            expected = "text"
        case _:
            return value
    raise CannotImport(f"{key} = {value}: {close}expected {expected}; correct the value")


def _row(key: str, value: object, index: "RuleIndex", origin: Origin) -> Row:
    for section, why in origin.unused.items():
        if key.startswith(f"{section}."):
            return Row(key, value, "none", (), why)
    if key in origin.losses:
        why, changes_result = origin.losses[key]
        return Row(key, value, "none", (), why, changes_result)
    found = index.of(key)
    parts = [rule for rule in found if isinstance(rule, Part)]
    if parts:
        fields = tuple(dict.fromkeys(path for part in parts for path in part.fields))
        how, changes_result = origin.remarks.get(key, ("", False))
        notes = [part.note for part in parts if part.note] + [how] * bool(how)
        return Row(key, value, "changed" if notes else "mapped", fields, "; ".join(notes), changes_result)
    for rule in found:
        if isinstance(rule, Lost):
            harmless = any(value is one or value == one for one in rule.neutral)
            return Row(key, value, "none", (), rule.why, not harmless)
        if isinstance(rule, Ignored):
            if key not in rule.keys and (near := index.near(key)) is not None:
                return Row(key, value, "unknown", (), f"did you mean {near}?", True)
            return Row(key, value, "none", (), rule.why)
    near = index.near(key)
    return Row(key, value, "unknown", (), f"did you mean {near}?" if near else "no rule knows this key", True)


class RuleIndex:
    """Rules by the keys that they name: `a.b` is itself, `a.*` is `a` and everything below."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules: dict[str, list[tuple[int, Rule]]] = {}
        for number, rule in enumerate(rules):
            for pattern in rule.keys:
                self._rules.setdefault(pattern, []).append((number, rule))

    def near(self, key: str) -> str | None:
        """A key that rules name and of which this may be a misspelling."""
        found = difflib.get_close_matches(key.rpartition(".")[2], self._names(key), n=1, cutoff=_SIMILAR)
        return found[0] if found else None

    def _names(self, key: str) -> list[str]:
        """The last parts of named keys in the section of this one."""
        section = key.rpartition(".")[0]
        return [name.rpartition(".")[2] for name in self._rules if name.rpartition(".")[0] == section]

    def is_section(self, key: str) -> bool:
        """True if rules read keys below this one, and none reads itself."""
        return key in self._sections and not any(
            isinstance(rule, Part | Lost) for _, rule in self._rules.get(key, ())
        )

    @cached_property
    def _sections(self) -> frozenset[str]:
        read = (
            name for name, found in self._rules.items() if any(isinstance(rule, Part) for _, rule in found)
        )
        parents = (itertools.accumulate(name.split(".")[:-1], "{}.{}".format) for name in read)
        return frozenset(itertools.chain.from_iterable(parents))

    def of(self, key: str) -> list[Rule]:
        """The rules of a key, in their order."""
        steps = key.split(".")
        above = [".".join([*steps[:end], "*"]) for end in range(1, len(steps) + 1)]
        found = [one for pattern in (key, *above) for one in self._rules.get(pattern, ())]
        return [rule for _, rule in sorted(found, key=lambda one: one[0])]


def place(tree: dict[str, Any], path: str, value: object) -> None:
    """Set the value at a dotted path of a tree; sections are merged, and lists continued."""
    *sections, name = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    there = tree.get(name)
    if isinstance(there, dict) and isinstance(value, dict):
        for key, below in value.items():
            place(there, key, below)
    elif isinstance(there, list) and isinstance(value, list):
        tree[name] = there + value
    else:
        tree[name] = value
