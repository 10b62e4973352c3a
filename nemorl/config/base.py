"""The base of every section of an experiment file, its checks, and calls of functions that a config names."""

import difflib
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from nemorl.errors import NemorlError, Problem, Problems

Check = TypeVar("Check", bound=Callable[..., Problems])
FieldLevel = Literal["simple", "advanced", "expert"]  # from which on forms show a field
LEVELS: tuple[FieldLevel, ...] = get_args(FieldLevel)
ADVANCED: JsonDict = {"level": "advanced"}
SIMPLE: JsonDict = {"level": "simple"}
EXPERT: JsonDict = {"level": "expert"}
Key = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]  # a name that the user chooses


def check(function: Check) -> Check:
    """Mark a function of `checks`, or a method of a section, whose fields are relative to it, as a check.

    Its parameters name sections of the experiment; it runs when these are valid. A problem of a section as a
    whole has no field.
    """
    function.__dict__["is_check"] = True
    return function


def check_of_training(function: Check) -> Check:
    """Mark a function of `checks` as a check of what only training cannot do."""
    function.__dict__["is_of_training"] = True
    return check(function)


def run_checks(checks: Iterable[Callable[..., Problems]], sections: Mapping[str, object]) -> Problems:
    """Run checks, as far as the sections that they take are valid."""
    for function in checks:
        parameters = inspect.signature(function).parameters
        if parameters.keys() <= sections.keys():
            yield from function(**{parameter: sections[parameter] for parameter in parameters})


class Config(BaseModel):
    """Frozen; unknown keys are errors; the string under a field is its help text."""

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,  # a process validates few of the sections that it imports
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
    field_level: ClassVar[FieldLevel] = "advanced"  # of its fields that have a default and name no other
    replaced_fields: ClassVar[Mapping[str, str]] = {}  # what to set instead of a field of earlier versions

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, section: Any) -> Any:
        """Pydantic takes true for 1; as text it is refused where a number is expected."""
        if not isinstance(section, dict):
            return section
        return {
            name: json.dumps(value)
            if isinstance(value, bool) and name in cls.model_fields and _is_number(cls.model_fields[name])
            else value
            for name, value in section.items()
        }

    def problems(self, sections: Mapping[str, object]) -> Problems:
        """Problems of this section and those in it; `sections` are the valid ones of the experiment."""
        members = [member for base in reversed(type(self).__mro__) for member in vars(base).items()]
        checks = dict.fromkeys(name for name, value in members if getattr(value, "is_check", False))
        yield from run_checks((getattr(self, name) for name in checks), sections)
        for name in type(self).model_fields:
            yield from problems_in(getattr(self, name), name, sections)

    def without_effect(self, names: Iterable[str], reason: str, prefix: str = "") -> Problems:
        """A problem for each of these fields that is not its default; `prefix` is put before its name."""
        for name in names:
            value = getattr(self, name)
            if value != type(self).model_fields[name].get_default(call_default_factory=True):
                shown = value.model_dump(mode="json") if isinstance(value, Config) else value
                yield Problem(f"{prefix}{name}", shown, reason)


def _is_number(field: FieldInfo) -> bool:
    """True if a field takes a number, and neither true nor text."""
    taken = set(_types_in(field.annotation))
    return bool(taken & {int, float}) and not taken & {bool, str, Any}


def _types_in(annotation: Any) -> Iterator[Any]:
    """Of `int | None`: int and NoneType; of a literal: the types of its values."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        yield from map(type, parts)
    elif parts:
        for part in parts:
            yield from _types_in(part)
    else:
        yield annotation


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 process`, `2 processes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """A question for the closest of the known names, to put before further text; empty if none is close."""
    close = difflib.get_close_matches(given, known, n=1)
    return f"did you mean `{close[0]}`? " if close else ""


def suggestion(given: str, known: Sequence[str]) -> str:
    """The closest of the known names, or all of them."""
    return did_you_mean(given, known).rstrip() or f"there are {', '.join(known) or 'none'}"


def problems_in(value: object, path: str, sections: Mapping[str, object]) -> Problems:
    """Problems of the sections in a field's value; `path` is that of the field."""
    if isinstance(value, Config):
        for problem in value.problems(sections):
            yield replace(problem, field=f"{path}.{problem.field}" if problem.field else path)
    elif isinstance(value, tuple | dict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from problems_in(item, f"{path}.{key}", sections)


@dataclass(frozen=True)
class Variants:
    """Annotation of a union of sections that differ by the field `by`; a section without it is `default`."""

    default: type[Config]
    by: str = "name"

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def named(section: Any) -> Any:
            name = self.default.model_fields[self.by].default
            return {self.by: name, **section} if isinstance(section, dict) else section

        return handler(Annotated[union, Field(discriminator=self.by), BeforeValidator(named)])


class NotImported(Exception):
    """Why a function cannot be imported, and the fix, to follow the path in a message."""


def function_at(path: str) -> Callable[..., Any]:
    """The function or class at `package.module:name`.

    Raises NotImported, with the fix, and NemorlError if the module raises it.
    """
    module, _, attribute = path.partition(":")
    try:
        imported = import_module(module)
        function = getattr(imported, attribute, None)
    except NemorlError:
        raise
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        fix = "put it in the current folder or install it" if is_missing else "correct the module"
        raise NotImported(f"cannot import {module}: {type(error).__name__}: {error}; {fix}") from error
    if function is None:
        names = [name for name, value in vars(imported).items() if callable(value)]
        near = did_you_mean(attribute, names).strip()
        raise NotImported(f"{module} has no {attribute}; {near or 'correct the name, or define it there'}")
    if not callable(function):
        raise NotImported(f"{attribute} in {module} is not callable: it is of type {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def call_within(seconds: float, function: Callable[[], Any]) -> Any:
    """Call code of the user's. Raises what it raises, and TimeoutError, with its thread left behind."""
    outcome: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except SystemExit as error:
            outcome.set_exception(RuntimeError(f"SystemExit: {error}"))
        except Exception as error:  # noqa: BLE001  raised in the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not futures.wait([outcome], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return outcome.result()
