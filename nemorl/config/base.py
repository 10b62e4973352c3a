"""The base of every section of an experiment file.

Code of one's own that a config names as `package.module:function`.
"""

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
