"""The base of every section of an experiment file."""

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


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
