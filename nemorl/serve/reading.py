"""From the body of a POST to a request, or to a sentence on what is wrong with it."""

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .errors import ApiError, bad_request
from .requests import MOST_CHOICES, MOST_STOPS

R = TypeVar("R", bound=BaseModel)
Path = tuple[str | int, ...]

_SHOWN_CHARACTERS = 80  # of a value

# By the kind of the error as pydantic calls it, up to the first underscore where it has several.
_WANTED = {
    "int": "a whole number is wanted",
    "float": "a number is wanted",
    "finite": "a finite number is wanted",
    "bool": "true or false is wanted",
    "string": "a text is wanted",
    "string_too_short": "a text that is not empty is wanted",
    "list": "a list is wanted",
    "dict": "an object is wanted",
    "model": "an object is wanted",
    "none": "null is wanted",
}
_BOUNDS = {
    "greater_than": ("a value above", "gt"),
    "greater_than_equal": ("a value of at least", "ge"),
    "less_than": ("a value below", "lt"),
    "less_than_equal": ("a value of at most", "le"),
    "too_short": ("a list with a length of at least", "min_length"),
    "too_long": ("a list with a length of at most", "max_length"),
}
# What may stand in fields that take several forms.
_FORMS = {
    "prompt": f"a text, token ids (whole numbers from 0 to {2**31 - 1}), or a list of up to {MOST_CHOICES} "
    "texts or lists of token ids is wanted",
    "stop": f"a text that is not empty, or a list of up to {MOST_STOPS} of them is wanted",
    "content": 'a text, or a list of {"type": "text", "text": ...} is wanted',
}


def read_request(kind: type[R], body: bytes) -> R:
    """A request from the body of a POST. Raises ApiError with what is wrong first."""
    try:
        tree = json.loads(body)
    except ValueError as error:  # also of bytes that are no text
        raise bad_request(f"The body is not JSON: {error}.") from error
    if not isinstance(tree, dict):
        raise bad_request("The body is not a JSON object.")
    # null stands for what is not given, as OpenAI's own client sends it
    given = {key: value for key, value in tree.items() if value is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False), given) from error


def _explained(errors: list[ErrorDetails], given: dict[str, Any]) -> ApiError:
    """The first field that is wrong. Where it may have several forms, there is an error for each of them."""
    places = [_place(details["loc"], given) for details in errors]
    path, form = places[0]
    if form is None:
        return _sentence(errors[0], path)
    deepest = max(
        (i for i, (_, other) in enumerate(places) if other == form), key=lambda i: len(places[i][0])
    )
    if form[-1] == "content" and len(places[deepest][0]) > len(form):  # a part of a list of parts
        return _sentence(errors[deepest], places[deepest][0])
    return _refusal(form, _at(form, given), _FORMS[str(form[-1])])


def _place(location: tuple[str | int, ...], given: object) -> tuple[Path, Path | None]:
    """The path as it stands in the body, and that of the first value on it which may have several forms.

    Pydantic puts the name of each form into its locations.
    """
    path: Path = ()
    form: Path | None = None
    value: object = given
    for number, step in enumerate(location):
        last = number == len(location) - 1
        if isinstance(value, dict) and (step in value or last):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
        else:
            form = form or path
            continue
        path = (*path, step)
    return path, form


def _sentence(details: ErrorDetails, path: Path) -> ApiError:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return bad_request(f"{_dotted(path)} is not served here: leave it out.", _dotted(path))
    if kind == "missing":
        return bad_request(f"{_dotted(path)} is missing.", _dotted(path))
    if kind == "literal_error":
        wanted = f"{_as_json(context['expected'])} is wanted"
    elif kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        limit = context[bound]
        wanted = f"{words} {f'{limit:g}' if isinstance(limit, float) else limit} is wanted"
    else:
        wanted = _WANTED.get(kind) or _WANTED.get(kind.partition("_")[0], details["msg"])
    return _refusal(path, details["input"], wanted)


def _refusal(path: Path, value: object, wanted: str) -> ApiError:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[: _SHOWN_CHARACTERS - 1] + "…"
    return bad_request(f"{_dotted(path)} = {shown}: {wanted}.", _dotted(path))


def _as_json(choices: str) -> str:
    """Pydantic lists them as Python writes them: `'auto' or 'none'`, `True`."""
    return re.sub(r"True|False", lambda word: word[0].lower(), choices.replace("'", '"'))


def _at(path: Path, tree: Any) -> object:
    for step in path:
        tree = tree[step]
    return tree


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
