"""Rewards of what an answer says: one number each, None where a reward does not apply.

A completion is a text (plain prompts) or a list of messages `{"role", "content"}` (chat), as in TRL.
"""

from collections.abc import Sequence

from nemorl.environments.tags import last_tagged

Completion = str | Sequence[dict[str, str]]


def exact_match(
    completions: Sequence[Completion], answer: Sequence[str | None], tag: str | None = None
) -> list[float | None]:
    """1 when the text equals the answer but for white space around it, else 0; None without an answer.

    With `tag`, the text inside the last `<tag>...</tag>` is compared, and a missing one is worth 0.
    """
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        text: str | None = last_text(completion)
        if tag is not None:
            text = last_tagged(text or "", tag)
        equal = expected is not None and text is not None and text.strip() == expected.strip()
        rewards.append(None if expected is None else float(equal))
    return rewards


def format_tags(completions: Sequence[Completion], tag: str = "answer") -> list[float]:
    """How much of the shape `... <tag>text</tag>` the last turn keeps, in quarters.

    One each for: exactly one opening tag; exactly one closing tag; a text between them; nothing after.
    """
    return [_kept_shape(last_text(completion), f"<{tag}>", f"</{tag}>") for completion in completions]


def last_text(completion: Completion) -> str:
    """What the policy said last."""
    if isinstance(completion, str):
        return completion
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    return said[-1] if said else ""


def _kept_shape(text: str, opening: str, closing: str) -> float:
    _, _, rest = text.partition(opening)
    inner, closed, after = rest.partition(closing)
    kept = (
        text.count(opening) == 1,
        text.count(closing) == 1,
        bool(closed) and bool(inner.strip()),
        bool(closed) and not after.strip(),
    )
    return sum(kept) / len(kept)
