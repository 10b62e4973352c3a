"""What pydantic found wrong, said to the person who wrote the file."""

import difflib
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemorl.errors import ABSENT, Violation

from .base import Config
from .schema import describe, locate, names, tag
from .yaml_tree import dotted

_WANTED = {
    "int": "a whole number is wanted",
    "float": "a number is wanted",
    "finite": "a finite number is wanted",
    "bool": "true or false is wanted",
    "string": "a text is wanted: put the value into quotes",
    "path": "a path is wanted",
    "tuple": "a list is wanted, such as `[1, 2]`",
    "dict": "a mapping is wanted",
    "model": "a section with fields of its own is wanted",
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
            return Violation(field, ABSENT, f"this field is required{_help(field)}")
        case "extra_forbidden":
            _, owners = locate(details["loc"][:-1])
            return Violation(field, value, _unknown_field(str(path[-1]), owners))
        case "union_tag_invalid":
            known = [name for section in sections for name in names(section)]
            where = f"{field}.{tag(sections[0])}"
            return Violation(where, context["tag"], _choice(str(context["tag"]), known))
        case "union_tag_not_found":
            known = [name for section in sections for name in names(section)]
            where = f"{field}.{tag(sections[0])}"
            return Violation(where, ABSENT, f"say which one is meant: {_listed(known)}")
        case "literal_error":
            known = _literals(field)
            return Violation(field, value, _choice(str(value), known) if known else details["msg"])
        case _ if kind in _BOUNDS:
            words, bound = _BOUNDS[kind]
            return Violation(field, value, f"a value {words} {context[bound]:g} is wanted")
        case _:
            wanted = _WANTED.get(kind.split("_")[0], details["msg"])
            return Violation(field, value, wanted + _help(field))


def _help(field: str) -> str:
    texts = [known.help for known in describe() if known.path == field and known.help]
    return f": {texts[0]}" if texts else ""


def _literals(field: str) -> list[str]:
    types = [known.type.removesuffix(" or null") for known in describe() if known.path == field]
    return [name for text in types for name in text.split(" | ")]


def _choice(given: str, known: list[str]) -> str:
    return f"{_did_you_mean(given, known)}known are {_listed(known)}"


def _unknown_field(name: str, owners: tuple[type[Config], ...]) -> str:
    known = sorted({field for owner in owners for field in owner.model_fields})
    elsewhere = sorted({f.path for f in describe() if f.path.rpartition(".")[2] == name})
    suggestion = f"did you mean {_listed(elsewhere)}? " if elsewhere else _did_you_mean(name, known)
    return f"there is no such field; {suggestion or f'known here are {_listed(known)}'}".rstrip()


def _did_you_mean(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f"did you mean `{close[0]}`? " if close else ""


def _listed(items: Iterable[str]) -> str:
    return ", ".join(f"`{item}`" for item in items)
