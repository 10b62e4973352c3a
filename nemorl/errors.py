"""Errors that are shown to the user as their message alone, without a traceback."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from textwrap import indent


class NemorlError(Exception):
    """An error that the user can fix; the message names the field, the value, the problem and the fix."""


class UsageError(NemorlError):
    """An invalid word of the command line; nothing was started."""


class RunError(NemorlError):
    """A run started and cannot continue."""


class RunStopped(RunError):
    """A run was stopped on request and can continue from its newest checkpoint."""


class Absent(Enum):
    ABSENT = "not given"  # as opposed to null


ABSENT = Absent.ABSENT


@dataclass(frozen=True)
class Problem:
    field: str  # path such as `policy.layout.sequence_parallel`; empty where a whole file is meant
    value: object  # as given, or ABSENT
    fix: str  # the problem and what to do
    origin: str = ""  # `file:line`, `command line` or `default`; empty if unknown
    is_absent: bool = False  # a file is missing that the machine of the run may have

    def __str__(self) -> str:
        where = f"  ({self.origin})" if self.origin else ""
        if self.value is ABSENT:
            subject = f"{self.field} is not given" if self.field else "the file"
        else:
            subject = f"{self.field} = {_shown(self.value)}" if self.field else _shown(self.value)
        return f"{subject}{where}\n    {self.fix}"


Problems = Iterator[Problem]  # what a check yields


class ConfigError(NemorlError):
    """An invalid configuration, with all of its problems."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source, self.problems = source, tuple(problems)  # the file as the user named it
        super().__init__(source, self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        listed = "\n".join(indent(str(problem), "  ") for problem in self.problems)
        return f"{self.source}: {count} configuration error{'s' * (count > 1)}\n{listed}"


MAX_CHARACTERS = 80  # of a value in a message


def _shown(value: object) -> str:
    """Return a value as written in YAML, cut to one line."""
    plain_text = isinstance(value, str) and value.isprintable() and value != ""
    text = str(value) if plain_text else json.dumps(value, ensure_ascii=False, default=str)
    return shorten(text)


def shorten(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
