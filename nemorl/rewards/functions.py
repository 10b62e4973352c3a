"""The rewards known by name: of the text of an answer, and of its length and repetitions.

Each returns one number an answer, or None where it does not apply. A completion is a text (plain prompts) or
a list of messages `{"role", "content"}` (chat), as in TRL. `|y|` is the number of an answer's sampled tokens,
end token included; results of tools are not among them.
"""

from collections.abc import Callable, Sequence

from nemorl.environments.tags import last_tagged

Completion = str | Sequence[dict[str, str]]


def exact_match(
    completions: Sequence[Completion], answer: Sequence[str | None], tag: str | None = None
) -> list[float | None]:
    """1 when the text equals the answer but for white space around it, else 0; None without an answer.

    With `tag`, the text inside the last `<tag>...</tag>` is compared, and a missing one is worth 0.
    """
    texts = [text if tag is None else last_tagged(text, tag) for text in map(last_text, completions)]
    return [
        None if expected is None else float(text is not None and text.strip() == expected.strip())
        for text, expected in zip(texts, answer, strict=True)
    ]


def format_tags(completions: Sequence[Completion], tag: str = "answer") -> list[float]:
    """How much of the shape `... <tag>text</tag>` the last turn keeps, in quarters.

    One each for: exactly one opening tag; exactly one closing tag; a text between them; nothing after.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    rewards = []
    for text in map(last_text, completions):
        inner, closed, after = text.partition(opening)[2].partition(closing)
        kept = [text.count(opening) == 1, text.count(closing) == 1]
        kept += [bool(closed and inner.strip()), bool(closed) and not after.strip()]
        rewards.append(sum(kept) / len(kept))
    return rewards


def last_text(completion: Completion) -> str:
    if isinstance(completion, str):
        return completion
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    return said[-1] if said else ""


Ids = Sequence[Sequence[int]]


def overlong_penalty(sampled_ids: Ids, max_length: int, buffer: int) -> list[float]:
    """The soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476).

         0                                      |y| <= max_length - buffer
        ((max_length - buffer) - |y|) / buffer  between them
        -1                                      |y| > max_length

    The paper takes `max_length` 20480 and `buffer` 4096; `generation.max_new_tokens` must let answers be that
    long. Raises ValueError for a buffer that is not between 1 and `max_length`.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer = {buffer} is not between 1 and max_length = {max_length}")
    free = max_length - buffer
    return [-min(max(len(ids) - free, 0) / buffer, 1.0) for ids in sampled_ids]


def length_penalty(sampled_ids: Ids, max_length: int) -> list[float]:
    """-min(|y| / max_length, 1): every token costs the same. Raises ValueError for a length below 1."""
    if max_length < 1:
        raise ValueError(f"max_length = {max_length} is not at least 1")
    return [-min(len(ids) / max_length, 1.0) for ids in sampled_ids]


def relative_length(
    completions: Sequence[Completion], sampled_ids: Ids, answer: Sequence[str | None], tag: str | None = None
) -> list[float | None]:
    """The length reward of Kimi k1.5 (arXiv 2501.12599), which compares answers of a group.

        l = 1/2 - (|y| - shortest) / (longest - shortest)
        l for a right answer, min(0, l) for a wrong one; 0 where all are equally long

    Right is what `exact_match` says of the text, or of the text inside the last `<tag>...</tag>`; where it
    does not apply this does not either.
    """
    lengths = [len(ids) for ids in sampled_ids]
    shortest, longest = min(lengths), max(lengths)
    rewards: list[float | None] = []
    for length, right in zip(lengths, exact_match(completions, answer, tag), strict=True):
        relative = 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0
        rewards.append(None if right is None else relative if right else min(0.0, relative))
    return rewards


def repetition_penalty(sampled_ids: Ids, n: int = 3) -> list[float]:
    """The share of an answer's n-grams of tokens that occurred in it before, as a cost: unique / all - 1.

    After Yeo et al. 2025, arXiv 2502.03373, who penalize single tokens. Raises ValueError for an n below 1.
    """
    if n < 1:
        raise ValueError(f"n = {n} is not at least 1")
    grams = [list(zip(*(ids[start:] for start in range(n)), strict=False)) for ids in sampled_ids]
    return [len(set(own)) / len(own) - 1 if own else 0.0 for own in grams]


BUILT_IN: dict[str, Callable[..., Sequence[float | None]]] = {
    "exact_match": exact_match,
    "format_tags": format_tags,
    "length_penalty": length_penalty,
    "overlong_penalty": overlong_penalty,
    "relative_length": relative_length,
    "repetition_penalty": repetition_penalty,
}
