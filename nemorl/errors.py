"""Errors for the person at the command line: their text is a sentence, and no traceback is shown for them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from textwrap import indent


class NemorlError(Exception):
    """Something the user can mend; the message says what was wrong, where, the value and the mend."""


class UsageError(NemorlError):
    """An option of the command line that cannot be meant; nothing was begun."""


class RunError(NemorlError):
    """A run began and cannot go on."""


class RunStopped(RunError):
    """A run was told to stop, and can go on from its newest checkpoint."""


class Absent(Enum):
    """Stands for a value that was not given, which null is."""

    ABSENT = "not given"


ABSENT = Absent.ABSENT


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a configuration."""

    field: str  # path such as `policy.layout.sequence_parallel`; empty where a whole file is meant
    value: object  # as it was given, or ABSENT
    fix: str  # why it is refused and what to do
    origin: str = ""  # `file:line`, `command line` or `default`; empty where none of these is known

    def __str__(self) -> str:
        where = f"  ({self.origin})" if self.origin else ""
        return f"{self._subject()}{where}\n    {self.fix}"

    def _subject(self) -> str:
        if self.value is ABSENT:
            return f"{self.field} is not given" if self.field else "the file"
        return f"{self.field} = {_shown(self.value)}" if self.field else _shown(self.value)


class ConfigError(NemorlError):
    """A configuration that is refused, with everything found wrong in it."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        """`source` is the file, as the user named it."""
        super().__init__(source, tuple(problems))
        self.source = source
        self.problems = tuple(problems)

    def __str__(self) -> str:
        count = (
            f"{len(self.problems)} configuration errors"
            if len(self.problems) > 1
            else "1 configuration error"
        )
        listed = "\n".join(indent(str(problem), "  ") for problem in self.problems)
        return f"{self.source}: {count}\n{listed}"


_SHOWN_CHARACTERS = 80


def _shown(value: object) -> str:
    """A value as YAML users write it, cut to a line."""
    plain_text = isinstance(value, str) and value.isprintable() and value != ""
    text = str(value) if plain_text else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
