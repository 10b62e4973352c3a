"""Code of one's own that a config names as `package.module:function`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from nemorl.errors import NemorlError


class NotImported(Exception):
    """Why there is no such function, for a sentence that begins with what was wanted."""


def function_at(path: str) -> Callable[..., Any]:
    """The function that `package.module:function` names.

    Raises NotImported, and NemorlError as a module of the user's may raise it by itself.
    """
    module, _, attribute = path.partition(":")
    try:
        function = getattr(import_module(module), attribute, None)
    except NemorlError:
        raise
    except (Exception, SystemExit) as error:  # whatever a module of the user's may raise
        raise NotImported(f"cannot import {module}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise NotImported(f"{module} has no function {attribute}")
    return function  # type: ignore[no-any-return]
