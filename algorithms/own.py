"""Functions of your own in place of built-in parts: found by their import path."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from nemorl.errors import NemorlError


class OwnPartError(NemorlError):
    """A function that cannot be found, called or used; the message names it and the mend."""


def find(what: str, name: str) -> Callable[..., Any]:
    """The function that `package.module:function` names, as a `what`. Raises OwnPartError."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(import_module(module), attribute, None)
    except OwnPartError:
        raise
    except (Exception, SystemExit) as error:  # whatever a module of the user's may raise
        raise OwnPartError(
            f"{what} `{name}`: {module} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if not callable(function):
        raise OwnPartError(f"{what} `{name}`: {module} has no function {attribute}")
    return function  # type: ignore[no-any-return]


def num_positional(function: Callable[..., Any]) -> int:
    """How many positional arguments a function has by name."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds for p in inspect.signature(function).parameters.values())
