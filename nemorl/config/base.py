"""The base of every section of an experiment file."""

from pydantic import BaseModel, ConfigDict


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
