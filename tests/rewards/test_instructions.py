"""Each constraint of IFEval on a text that keeps it and one that does not."""

import pytest

from nemorl.rewards.instructions import CONSTRAINTS, follows, instructions

POEM = "Roses are red.\nViolets are blue!"
# Constraint, arguments, a text that keeps it, one that does not.
EXAMPLES = [
    ("keywords:existence", {"keywords": ["rose", "blue"]}, POEM, "Roses are red."),
    ("keywords:forbidden_words", {"forbidden_words": ["are"]}, "I care.", "They Are."),
    (
        "keywords:frequency",
        {"keyword": "are", "frequency": 2, "relation": "at least"},
        POEM,
        "Roses are red.",
    ),
    (
        "keywords:letter_frequency",
        {"letter": "r", "let_frequency": 3, "let_relation": "less than"},
        "Red roses",
        "Red roses are rare",
    ),
    (
        "language:response_language",
        {"language": "de"},
        "Heute scheint die Sonne, und wir gehen in den Garten.",
        "The sun is shining today, and we are going into the garden.",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "one, two",
        "one two three",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        "Dr. J. Smith ran. He fell! Why?",
        "Dr. J. Smith ran. He fell",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\n***\ntwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "second"},
        'First.\n\n"Second, it says.',
        "Second.\n\nFirst.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [city]", "[name] of it"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. And hello", "Bye."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n**two**"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* **two**", "*one* ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\none\nSECTION 2\ntwo",
        "SECTION 1\none SECTION two",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', '{"a": 1'),
    ("detectable_format:title", {}, "<<A rose>>\nRed.", "<< >>\nRed."),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("combination:two_responses", {}, "one ****** two", "one ****** one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why?"}, "why? Because.", "Because. Why?"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'A story. the END." ', "The end. Almost"),
    ("startend:quotation", {}, ' "quoted" ', '"quoted'),
    ("change_case:english_capital", {}, "THE SUN IS SHINING ON THE HOUSE TODAY", "The sun is shining"),
    (
        "change_case:english_lowercase",
        {},
        "the sun is shining on the house today",
        "die sonne scheint auf",
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        "a WELL-KNOWN fact",
        "NASA and ESA",
    ),
    ("punctuation:no_comma", {}, "one two", "one, two"),
]


@pytest.mark.parametrize(
    ("constraint", "arguments", "kept", "broken"), EXAMPLES, ids=[e[0] for e in EXAMPLES]
)
def test_a_constraint_is_verified(constraint, arguments, kept, broken):
    # The public dataset has all arguments in each row, those of other constraints as None.
    given = dict.fromkeys(("num_words", "relation", "language", "keywords")) | arguments
    assert follows(kept, constraint, given)
    assert not follows(broken, constraint, given)


def test_all_25_constraints_have_an_example():
    assert {example[0] for example in EXAMPLES} == CONSTRAINTS.keys()
    assert len(CONSTRAINTS) == 25


IDS = ["punctuation:no_comma", "keywords:existence", "startend:quotation"]
ARGUMENTS = [{}, {"keywords": ["red"]}, {}]


def test_the_reward_is_the_share_of_constraints_or_all_of_them():
    texts = ['"red"', "red", "red, blue", ""]
    columns = {"instruction_id_list": [IDS] * 4, "kwargs": [ARGUMENTS] * 4}
    assert instructions(texts, **columns) == [1.0, 2 / 3, 1 / 3, 0.0]
    assert instructions(texts, **columns, score="all") == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("ids", "arguments", "problem"),
    [
        (["keywords:rhyme"], [{}], "unknown constraint 'keywords:rhyme'"),
        (["startend:end_checker"], [{}], "startend:end_checker does not accept {}: .*end_phrase"),
        (["punctuation:no_comma"], [{"num_words": 3}], "does not accept {'num_words': 3}"),
        (["punctuation:no_comma"], [], "1 constraints with 0 arguments"),
        (
            ["length_constraints:number_words"],
            [{"num_words": 3, "relation": "about"}],
            "relation = 'about'",
        ),
    ],
)
def test_wrong_columns_are_named(ids, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        instructions(["red"], [ids], [arguments])
