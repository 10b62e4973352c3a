"""A reward by import path."""

from collections.abc import Sequence


def starts_right(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 for the right first digit."""
    return [float(text[:1] == expected[:1]) for text, expected in zip(completions, answer, strict=True)]


def differs(completions: Sequence[str], **_: object) -> list[float]:
    """1 for an odd number of characters, which any model has in some samples and not in others."""
    return [float(len(text) % 2) for text in completions]
