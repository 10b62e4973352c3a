"""The rewards known by name: of the text of an answer, and of its length and repetitions.

Each returns one number an answer, or None where it does not apply. A completion is a text (plain prompts) or
a list of messages `{"role", "content"}` (chat), as in TRL. `|y|` is the number of an answer's sampled tokens,
end token included; results of tools are not among them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .instructions import instructions
from .texts import Completion, json_in, last_text, said_in


def exact_match(
    completions: Sequence[Completion], answer: Sequence[str | None], tag: str | None = None
) -> list[float | None]:
    """1 when the text equals the answer but for white space around it, else 0; None without an answer.

    With `tag`, the text inside the last `<tag>...</tag>` is compared, and a missing one is worth 0.
    """
    return [
        None if expected is None else float(text is not None and text.strip() == expected.strip())
        for text, expected in zip(said_in(completions, tag), answer, strict=True)
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


def pattern(completions: Sequence[Completion], regex: str, tag: str | None = None) -> list[float]:
    """1 when the complete text matches the regular expression, in which a dot is any character, else 0.

    With `tag`, the text inside the last `<tag>...</tag>` without white space around it is matched, and a
    missing one is worth 0. Raises ValueError for a regular expression that Python's `re` does not accept.
    """
    try:
        whole = re.compile(regex, re.DOTALL)
    except re.error as error:
        raise ValueError(f"regex = {regex!r}: {error}") from error
    texts = said_in(completions, tag)
    return [
        float(text is not None and whole.fullmatch(text if tag is None else text.strip()) is not None)
        for text in texts
    ]


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Ways to name a choice, of which the last in the text counts: \boxed{B}; the answer is (B); Answer: **B**.
_STATED = re.compile(r"\\boxed\{\W{0,3}([A-Z])\W{0,3}\}|\b[Aa]nswer(?: is|:)\W{0,6}([A-Z])\b")
_ALONE = re.compile(r"\W{0,3}([A-Z])(?:[).:\]*].*|\W{0,3})", re.DOTALL)  # a complete answer: B, (B), B) Paris


def multiple_choice(
    completions: Sequence[Completion], answer: Sequence[str | None], tag: str | None = None
) -> list[float | None]:
    """1 for the letter of the right choice, else 0; None without an answer.

    The task's answer is a letter, or a number counted from 0. The letter in the text is the last one after
    `answer is` or `answer:` or in `\\boxed{}`, or the one at its start, as in `B` or `(B) Paris`. With `tag`
    it is searched inside the last `<tag>...</tag>`. Raises ValueError if the task's answer names no choice.
    """
    rewards: list[float | None] = []
    for text, expected in zip(said_in(completions, tag), answer, strict=True):
        if expected is None:
            rewards.append(None)
            continue
        right = expected.strip().strip("().").upper()
        if right.isdecimal() and int(right) < len(LETTERS):
            right = LETTERS[int(right)]
        if len(right) != 1 or right not in LETTERS:
            raise ValueError(f"the task's answer is {expected!r}: expected a letter, or a number from 0")
        rewards.append(float(_choice(text or "") == right))
    return rewards


def _choice(text: str) -> str | None:
    if stated := _STATED.findall(text):
        boxed, after = stated[-1]
        return str(boxed or after)
    alone = _ALONE.fullmatch(text.strip())
    return alone and alone[1]


def fuzzy_match(
    completions: Sequence[Completion],
    answer: Sequence[str | None],
    tag: str | None = None,
    min_similarity: float = 0.0,
) -> list[float | None]:
    """The similarity of the text to the answer, 0 to 1; 0 below `min_similarity`; None without an answer.

    It is `1 - d / (len(a) + len(b))`, d the number of characters to insert and to delete, without regard to
    case and punctuation (rapidfuzz's `ratio`). A missing `<tag>...</tag>` is worth 0.
    """
    from rapidfuzz import fuzz, utils

    return [
        None
        if expected is None
        else fuzz.ratio(
            text or "", expected, processor=utils.default_process, score_cutoff=100 * min_similarity
        )
        / 100
        for text, expected in zip(said_in(completions, tag), answer, strict=True)
    ]


def json_schema(
    completions: Sequence[Completion],
    schema: Mapping[str, Any] | Sequence[Mapping[str, Any] | str | None],
    tag: str | None = None,
) -> list[float | None]:
    """1 when the text is JSON that the schema accepts, else 0; None for a task without a schema.

    The schema is an argument, or a column with an object or its JSON. The text may be in a code block. The
    schema's own `$schema` selects the draft (2020-12 by default); references to other documents are not
    loaded. Raises ValueError for an invalid schema.
    """
    of_answers = [schema] * len(completions) if isinstance(schema, Mapping) else schema
    validators = {text: _validator(text) for text in {_as_json(one) for one in of_answers if one is not None}}
    rewards: list[float | None] = []
    for text, one in zip(said_in(completions, tag), of_answers, strict=True):
        if one is None:
            rewards.append(None)
            continue
        found, value = json_in(text or "")
        rewards.append(float(found and validators[_as_json(one)].is_valid(value)))
    return rewards


def _as_json(schema: Mapping[str, Any] | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)


def _validator(text: str) -> Any:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        schema = json.loads(text)
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise ValueError(f"invalid JSON schema: {str(error).splitlines()[0]}") from error
    return kind(schema, registry=Registry())  # an empty one, which loads nothing


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


def constant(sampled_ids: Ids) -> list[float]:
    """1 for every answer: the weight is added to each reward.

    Baselines subtract it again. A critic has to learn it first, as where rewards are -1 and 1 instead of 0
    and 1.
    """
    return [1.0] * len(sampled_ids)


BUILT_IN: dict[str, Callable[..., Sequence[float | None]]] = {
    "constant": constant,
    "exact_match": exact_match,
    "format_tags": format_tags,
    "fuzzy_match": fuzzy_match,
    "instructions": instructions,
    "json_schema": json_schema,
    "length_penalty": length_penalty,
    "multiple_choice": multiple_choice,
    "overlong_penalty": overlong_penalty,
    "pattern": pattern,
    "relative_length": relative_length,
    "repetition_penalty": repetition_penalty,
}
# What those of the extra `rewards` import.
PACKAGES = {"fuzzy_match": "rapidfuzz", "instructions": "langdetect", "json_schema": "jsonschema"}
