"""Instructions that a program can verify: those of IFEval (Zhou et al. 2023, arXiv 2311.07911).

The columns `instruction_id_list` and `kwargs` of the public dataset name the constraints of a task and their
arguments. Constraints are followed as in the paper's program, with three differences: sentences and words in
capitals are found by regular expressions instead of NLTK's models, and keywords are texts, not patterns.
"""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

from .texts import Completion, json_in, last_text

# Not after an initial or a title.
_SENTENCE_END = re.compile(r"(?<!\b[A-Z])(?<!\b[DM]r)(?<!\bMs)(?<!\bMrs)[.!?]+[\"')\]]*\s+")
_WORD_TO_CASE = re.compile(r"\w+(?:[-'.]\w+)*")  # a hyphenated word is one word
_YES_NO = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def instructions(
    completions: Sequence[Completion],
    instruction_id_list: Sequence[Sequence[str]],
    kwargs: Sequence[Sequence[Mapping[str, Any]]],
    score: Literal["share", "all"] = "share",
) -> list[float]:
    """The share of the task's constraints that the last turn keeps; with `all`, 1 or 0. Nothing keeps none.

    Raises ValueError for an unknown constraint, and for arguments that one lacks or does not take.
    """
    if score not in ("share", "all"):
        raise ValueError(f"score = {score!r}: expected share or all")
    rewards = []
    for text, ids, arguments in zip(map(last_text, completions), instruction_id_list, kwargs, strict=True):
        if len(ids) != len(arguments) or not ids:
            raise ValueError(f"{len(ids)} constraints with {len(arguments)} arguments: expected equally many")
        kept = [follows(text, name, given) for name, given in zip(ids, arguments, strict=True)]
        rewards.append(float(all(kept)) if score == "all" else sum(kept) / len(kept))
    return rewards


def follows(text: str, constraint: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a text keeps one constraint. Arguments that are None count as not given, as in the dataset."""
    check = CONSTRAINTS.get(constraint)
    if check is None:
        raise ValueError(f"unknown constraint {constraint!r}; there are {', '.join(sorted(CONSTRAINTS))}")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        is_kept = check(text, **given)
    except TypeError as error:
        raise ValueError(f"the constraint {constraint} does not accept {given}: {error}") from error
    return bool(text.strip()) and is_kept


def _relates(count: int, relation: str, bound: int) -> bool:
    if relation == "less than":
        return count < bound
    if relation == "at least":
        return count >= bound
    raise ValueError(f"relation = {relation!r}: expected `less than` or `at least`")


# Keywords and letters.


def _occurrences(text: str, keyword: str) -> int:
    return text.lower().count(keyword.lower())


def _has_keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(_occurrences(text, keyword) for keyword in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _relates(_occurrences(text, keyword), relation, frequency)


def _has_no_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(
        re.search(rf"\b{re.escape(word)}\b", text, flags=re.IGNORECASE) for word in forbidden_words
    )


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _relates(_occurrences(text, letter), let_relation, let_frequency)


# Language and case.


_detecting = threading.Lock()  # rewards run in threads, and langdetect loads its profiles on the first call


@cache
def _profiles() -> Any:
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.seed = 0  # equal results for equal texts
    factory.load_profile(PROFILES_DIRECTORY)
    return factory


def _is_in_language(text: str, language: str) -> bool:
    """True also for a text without letters, of which no language can be detected."""
    from langdetect import LangDetectException

    with _detecting:
        detector = _profiles().create()
        detector.append(text)
        try:
            return bool(detector.detect() == language)
        except LangDetectException:
            return True


def _is_english_capitals(text: str) -> bool:
    return text.isupper() and _is_in_language(text, "en")


def _is_english_lowercase(text: str) -> bool:
    return text.islower() and _is_in_language(text, "en")


def _capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    count = sum(word.isupper() for word in _WORD_TO_CASE.findall(text))
    return _relates(count, capital_relation, capital_frequency)


# Lengths.


def _number_of_words(text: str, num_words: int, relation: str) -> bool:
    return _relates(len(re.findall(r"\w+", text)), relation, num_words)


def _number_of_sentences(text: str, num_sentences: int, relation: str) -> bool:
    sentences = [part for part in _SENTENCE_END.split(text.strip()) if part.strip()]
    return _relates(len(sentences), relation, num_sentences)


def _parts(text: str, separator: str) -> list[str] | None:
    """What is between separators, which may begin and end the text; None if a part in between is empty."""
    parts = [part.strip() for part in text.split(separator)]
    parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return parts if all(parts) else None


def _number_of_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs are separated by `***`."""
    parts = _parts(text, "***")
    return parts is not None and len(parts) == num_paragraphs


def _first_word_of_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are separated by an empty line."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if not 1 <= nth_paragraph <= count or not parts[nth_paragraph - 1].strip():
        return False
    word = re.split(r"[.,?!'\"]", parts[nth_paragraph - 1].split()[0].lstrip("'\""))[0]
    return count == num_paragraphs and word.lower() == first_word.lower()


# Content and format.


def _number_of_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _has_postscript(text: str, postscript_marker: str) -> bool:
    """With white space between the letters of P.S. and P.P.S. as well."""
    letters = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = letters.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(pattern, text.lower()) is not None


def _number_of_bullets(text: str, num_bullets: int) -> bool:
    bullets = re.findall(r"^\s*(?:\*[^*].*|-.*)$", text, flags=re.MULTILINE)
    return len(bullets) == num_bullets


def _number_of_highlights(text: str, num_highlights: int) -> bool:
    """Of the form `*one*` or `**two**`, and not empty."""
    single, double = re.findall(r"\*([^\n*]*)\*", text), re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(part.strip()) for part in (*single, *double)) >= num_highlights


def _number_of_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Each begins with the word and a number, as in `Section 1`."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def _is_json(text: str) -> bool:
    return json_in(text)[0]


def _has_title(text: str) -> bool:
    return any(title.strip("<>").strip() for title in re.findall(r"<<[^\n]+>>", text))


def _is_yes_no_maybe(text: str) -> bool:
    return any(option in text for option in _YES_NO)


def _has_no_comma(text: str) -> bool:
    return "," not in text


# Combinations, start and end.


def _has_two_responses(text: str) -> bool:
    parts = _parts(text, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": _capital_word_frequency,
    "change_case:english_capital": _is_english_capitals,
    "change_case:english_lowercase": _is_english_lowercase,
    "combination:repeat_prompt": _repeats_prompt,
    "combination:two_responses": _has_two_responses,
    "detectable_content:number_placeholders": _number_of_placeholders,
    "detectable_content:postscript": _has_postscript,
    "detectable_format:constrained_response": _is_yes_no_maybe,
    "detectable_format:json_format": _is_json,
    "detectable_format:multiple_sections": _number_of_sections,
    "detectable_format:number_bullet_lists": _number_of_bullets,
    "detectable_format:number_highlighted_sections": _number_of_highlights,
    "detectable_format:title": _has_title,
    "keywords:existence": _has_keywords,
    "keywords:forbidden_words": _has_no_forbidden_words,
    "keywords:frequency": _keyword_frequency,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _is_in_language,
    "length_constraints:nth_paragraph_first_word": _first_word_of_paragraph,
    "length_constraints:number_paragraphs": _number_of_paragraphs,
    "length_constraints:number_sentences": _number_of_sentences,
    "length_constraints:number_words": _number_of_words,
    "punctuation:no_comma": _has_no_comma,
    "startend:end_checker": _ends_with,
    "startend:quotation": _is_quoted,
}
