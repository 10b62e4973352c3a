"""Sentences for the type errors that pydantic finds, in configurations and in requests to a server."""

import json
import re
from collections.abc import Mapping
from typing import Any

# By the kind of the error as pydantic calls it, up to the first underscore if it has several.
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "a string",
    "path": "a path",
    "tuple": "a list, such as `[1, 2]`",
    "list": "a list",
    "dict": "a mapping",
    "model": "a section with fields",
    "none": "null",
}
_BOUNDS = {
    "greater_than": ("a value more than", "gt"),
    "greater_than_equal": ("a value of at least", "ge"),
    "less_than": ("a value less than", "lt"),
    "less_than_equal": ("a value of at most", "le"),
    "string_too_short": ("a string with a length of at least", "min_length"),
    "too_short": ("a list with a length of at least", "min_length"),
    "too_long": ("a list with a length of at most", "max_length"),
}


def expectation(details: Mapping[str, Any]) -> str:
    """What was expected, of one of the errors of a pydantic ValidationError: `expected an integer`."""
    kind, context = details["type"], details.get("ctx", {})
    if kind == "literal_error":  # listed as in Python: `'auto' or 'none'`, `True`
        choices = re.sub(r"True|False", lambda word: word[0].lower(), context["expected"])
        return f"expected {choices.replace(chr(39), chr(34))}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"expected {words} {json.dumps(context[bound]).removesuffix('.0')}"
    if kind == "string_pattern_mismatch":
        return "invalid format"
    expected = _TYPES.get(kind.partition("_")[0])
    return f"expected {expected}" if expected else str(details["msg"])
