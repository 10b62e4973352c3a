"""The families that are supported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .deepseek_v3 import DEEPSEEK_V3
from .errors import UnsupportedModel
from .family import ModelFamily
from .gemma3 import GEMMA3
from .gpt_oss import GPT_OSS
from .llama import LLAMA
from .mistral import MISTRAL, MIXTRAL
from .qwen import QWEN2, QWEN3, QWEN3_MOE

if TYPE_CHECKING:
    from .shape import ModelShape

FAMILIES: tuple[ModelFamily, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    MIXTRAL,
    GPT_OSS,
    DEEPSEEK_V3,
    GEMMA3,
)


def family_of(shape: ModelShape) -> ModelFamily:
    """The family of a model."""
    return next(family for family in FAMILIES if family.name == shape.family)


def family_of_architecture(architecture: str, source: str, *, scalar: bool = False) -> ModelFamily:
    """The family of an architecture named in config.json; `source` is the file, for the message.

    For a model with a `scalar` head a classifier will do as well.
    """
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
        if architecture == family.scalar_architecture():
            if scalar:
                return family
            raise UnsupportedModel(
                f"{source}: architectures names {architecture!r}, which has no head for the vocabulary: "
                "it can be a critic or reward model, with head 'scalar'"
            )
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise UnsupportedModel(f"{source}: architectures names {architecture!r}; supported are {known}")
