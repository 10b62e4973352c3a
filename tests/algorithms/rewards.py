"""A reward by import path."""

from collections.abc import Sequence


def starts_right(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 for the right first digit."""
    return [float(text[:1] == expected[:1]) for text, expected in zip(completions, answer, strict=True)]
