"""The rewards known by name."""

from collections.abc import Callable, Sequence

from .penalties import length_penalty, overlong_penalty, relative_length, repetition_penalty
from .texts import exact_match, format_tags

BUILT_IN: dict[str, Callable[..., Sequence[float | None]]] = {
    "exact_match": exact_match,
    "format_tags": format_tags,
    "length_penalty": length_penalty,
    "overlong_penalty": overlong_penalty,
    "relative_length": relative_length,
    "repetition_penalty": repetition_penalty,
}
