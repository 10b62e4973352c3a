"""The base of every section of an experiment file.

Code of one's own that a config names as `package.module:function`.
"""

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from nemorl.errors import NemorlError


class Config(BaseModel):
    """Frozen; unknown keys are errors; the string under a field is its help text."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


def default_variant(variant: type[Config], by: str = "name") -> BeforeValidator:
    """For a union told apart by the field `by`: a section that does not say which it is is this variant.

    Without it `optimizer: {lr: 1e-5}` would be refused for not repeating the name that is the default.
    """
    name = variant.model_fields[by].default

    def named(section: Any) -> Any:
        return {by: name, **section} if isinstance(section, dict) else section

    return BeforeValidator(named)


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


def call_within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what code of the user's returns, or raise what it raises, as an Exception.

    Raises TimeoutError after `seconds`. The call runs in a daemon thread, which is left behind when it hangs.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = function()
        except SystemExit as error:
            outcome["error"] = RuntimeError(f"SystemExit: {error}")
        except Exception as error:  # noqa: BLE001  raised in the caller's thread
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
