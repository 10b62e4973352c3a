"""Functions of your own in place of built-in parts: found by their import path."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemorl.config.base import NotImported, function_at
from nemorl.errors import NemorlError


class OwnPartError(NemorlError):
    """A function that cannot be found, called or used; the message names it and the mend."""


def find(what: str, name: str) -> Callable[..., Any]:
    """The function that `package.module:function` names, as a `what`. Raises OwnPartError."""
    try:
        return function_at(name)
    except NotImported as error:
        raise OwnPartError(f"{what} `{name}`: {error}") from error.__cause__


def tried(
    function: Callable[..., Any],
    given: Sequence[Any],
    arguments: Mapping[str, Any],
    *,
    called: str,
    wanted: str,
    where: str,
) -> Any:
    """What a function answers to `given`, which is called `where` in messages, and `arguments`.

    `called` is the part by name, `wanted` how it must let itself be called. Raises OwnPartError.
    """
    try:
        inspect.signature(function).bind(*given, **arguments)
    except TypeError as error:
        raise OwnPartError(f"{called}: it cannot be called as {wanted}: {error}") from error
    try:
        found = function(*given, **arguments)
    except OwnPartError:
        raise
    except (Exception, SystemExit) as error:
        raise OwnPartError(f"{called}: on {where} it raised {type(error).__name__}: {error}") from error
    if inspect.iscoroutine(found):
        found.close()  # else Python warns that nobody awaited it
        raise OwnPartError(f"{called}: it is an async function: make it a plain one, `def`")
    return found


def num_positional(function: Callable[..., Any]) -> int:
    """How many positional arguments a function has by name."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds for p in inspect.signature(function).parameters.values())
