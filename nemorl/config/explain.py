"""What pydantic found wrong, said to the person who wrote the file."""

import difflib
import re
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemorl.errors import ABSENT, Violation

from .base import Config
from .schema import describe, help_text, locate, names, tag
from .yaml import FieldPath, dotted

_MOST_NAMED = 4  # variants in one sentence
_QUOTED = re.compile(r"'([^']*)'")  # the choices, as pydantic lists them: 'a', 'b' or 'c'

_WANTED = {
    "int": "a whole number is wanted",
    "float": "a number is wanted",
    "finite": "a finite number is wanted",
    "bool": "true or false is wanted",
    "string": "a text is wanted (put the value into quotes)",
    "path": "a path is wanted",
    "tuple": "a list is wanted, such as `[1, 2]`",
    "dict": "a mapping is wanted",
    "model": "a section with fields of its own is wanted",
}
# What null is written for, and how to say it.
_SWITCHED_OFF = {
    "generation": "where nothing is sampled no engine is started",
    "algorithm.validation": "it is off with `period: null, at_start: false, at_end: false`, its defaults",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "string_too_short": ("of a length of at least", "min_length"),
}


def explain(error: ValidationError) -> list[Violation]:
    """One violation for each thing pydantic found."""
    return [_violation(details) for details in error.errors(include_url=False)]


def _violation(details: ErrorDetails) -> Violation:
    path, sections = locate(details["loc"])
    field, kind, value = dotted(path), details["type"], details["input"]
    context = details.get("ctx", {})
    match kind:
        case "missing":
            return Violation(field, ABSENT, f"this field is required{_help(details)}")
        case "extra_forbidden":
            return Violation(field, value, _unknown_field(details["loc"], path))
        case "union_tag_invalid":
            known = [name for section in sections for name in names(section)]
            where = f"{field}.{tag(sections[0])}"
            return Violation(where, context["tag"], _choice(str(context["tag"]), known))
        case "union_tag_not_found":
            known = [name for section in sections for name in names(section)]
            where = f"{field}.{tag(sections[0])}"
            return Violation(where, ABSENT, f"say which one is meant: {_listed(known)}")
        case "literal_error":
            return Violation(field, value, _choice(str(value), _QUOTED.findall(context["expected"])))
        case "too_short":
            return Violation(
                field, value, f"a list of at least {context['min_length']} is wanted{_help(details)}"
            )
        case "string_pattern_mismatch" if details["loc"][-1] == "[key]":
            mend = "a name of one's own is of small letters, digits and _, a letter first, such as `sums_2`"
            return Violation(dotted(path[:-2]), value, mend)
        case "string_pattern_mismatch":
            return Violation(field, value, f"it is not written as it must be{_help(details)}")
        case _ if kind in _BOUNDS:
            words, bound = _BOUNDS[kind]
            return Violation(field, value, f"a value {words} {context[bound]:g} is wanted")
        case _ if value is None and kind.startswith("model") and _has_default(details):
            off = f"; {_SWITCHED_OFF[field]}" if field in _SWITCHED_OFF else ""
            mend = f"this section cannot be null: leave it out to have its defaults{off}"
            return Violation(field, value, mend + _help(details))
        case _:
            wanted = _WANTED.get(kind.split("_")[0], details["msg"])
            return Violation(field, value, wanted + _help(details))


def _has_default(details: ErrorDetails) -> bool:
    owners, name = _owners(details)
    return any(name in owner.model_fields and not owner.model_fields[name].is_required() for owner in owners)


def _owners(details: ErrorDetails) -> tuple[tuple[type[Config], ...], str]:
    """The sections that may hold the field that an error is about, in the variant chosen, and its name."""
    location = details["loc"]
    while location and isinstance(location[-1], int):
        location = location[:-1]
    _, owners = locate(location[:-1])
    return owners, str(location[-1])


def _help(details: ErrorDetails) -> str:
    """The help of the field that an error is about."""
    owners, name = _owners(details)
    text = next((help_text(owner, name) for owner in owners if name in owner.model_fields), "")
    return f": {text}" if text else ""


def _choice(given: str, known: list[str]) -> str:
    return f"{_did_you_mean(given, known)}known are {_listed(known)}"


def _unknown_field(location: tuple[str | int, ...], path: FieldPath) -> str:
    name = str(path[-1])
    _, owners = locate(location[:-1])
    # Among the variants from which one was chosen, whose name is the last step but one of the location.
    named = len(location) > 1 and any(location[-2] in names(owner) for owner in owners)
    around = locate(location[:-2])[1] if named else ()
    others = [section for section in around if name in section.model_fields]
    if others:
        theirs = [one for section in others for one in names(section)]
        which = f"{_listed(theirs[:_MOST_NAMED])}{' and others' * (len(theirs) > _MOST_NAMED)}"
        choice = dotted((*path[:-1], tag(owners[0])))
        return (
            f"this field belongs to {which}, and {choice} is `{location[-2]}`: remove it, or change {choice}"
        )
    known = sorted({field for owner in owners for field in owner.model_fields})
    elsewhere = sorted({f.path for f in describe() if f.path.rpartition(".")[2] == name} - {dotted(path)})
    nearby = [place for place in elsewhere if place.startswith(f"{path[0]}.")]
    elsewhere = (nearby or elsewhere)[:_MOST_NAMED]
    suggestion = f"did you mean {_listed(elsewhere)}? " if elsewhere else _did_you_mean(name, known)
    return f"there is no such field; {suggestion or f'known here are {_listed(known)}'}".rstrip()


def _did_you_mean(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f"did you mean `{close[0]}`? " if close else ""


def _listed(items: Iterable[str]) -> str:
    return ", ".join(f"`{item}`" for item in items)
