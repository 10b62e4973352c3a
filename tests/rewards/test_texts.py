import json

import pytest

from nemorl.config.environment import FunctionRewardConfig
from nemorl.rewards.find import RewardError, find_reward
from nemorl.rewards.functions import (
    PACKAGES,
    exact_match,
    format_tags,
    fuzzy_match,
    json_schema,
    multiple_choice,
    pattern,
)


def test_exact_match_compares_trimmed_texts():
    assert exact_match(["046", " 046\n", "46", "", "046"], ["046", "046", "046", "046", None]) == [
        1.0,
        1.0,
        0.0,
        0.0,
        None,
    ]


def test_exact_match_looks_into_a_tag():
    completions = ["so <answer> 4 </answer>", "4", "<answer>5</answer>"]
    assert exact_match(completions, ["4"] * 3, tag="answer") == [1.0, 0.0, 0.0]


def test_exact_match_reads_the_last_turn_of_a_conversation():
    conversation = [
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "5"},
    ]
    assert exact_match([conversation, conversation[:2]], ["5", "4"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("thus <answer>4</answer>", 1.0),
        ("<answer>4</answer>\n", 1.0),
        ("<answer>4</answer> I hope", 0.75),  # something after it
        ("<answer> </answer>", 0.75),  # nothing in it
        ("<answer>4", 0.25),  # opened once, and that is all
        ("4</answer>", 0.25),
        ("<answer>4</answer><answer>5</answer>", 0.25),  # twice, and the first is not the last
        ("4", 0.0),
        ("", 0.0),
    ],
)
def test_format_is_rewarded_in_quarters(text, share):
    assert format_tags([text]) == [share]


def test_format_takes_another_tag():
    assert format_tags(["<sum>4</sum>", "<answer>4</answer>"], tag="sum") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" (b) ".upper(), "B"),
        ("B) Paris, of course", "B"),
        ("**B**", "B"),
        ("It is not A. The answer is (B).", "B"),
        ("The answer is A. No, the answer is B", "B"),
        ("so \\boxed{B}", "B"),
        ("Answer: B", "B"),
        ("A or B", None),  # no choice
        ("A bird", None),  # an article
        ("", None),
    ],
)
def test_a_choice_is_read_from_the_text(text, letter):
    completions = [text] * 3
    assert multiple_choice(completions, ["A", "B", None]) == [letter == "A", letter == "B", None]


def test_choices_are_numbered_from_0_and_looked_for_in_a_tag():
    completions = ["A <answer>C</answer>", "<answer>(B) Rome</answer>", "C"]
    assert multiple_choice(completions, ["2"] * 3, tag="answer") == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="the task's answer is 'Rome': expected a letter"):
        multiple_choice(["B"], ["Rome"])


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a\nb</think>\n<answer>12</answer>", 1.0),
        ("<think>a</think> <answer>12</answer>", 0.0),
        ("<think>a</think>\n<answer>12</answer> and more", 0.0),
        ("12", 0.0),
    ],
)
def test_a_pattern_matches_the_complete_text(text, score):
    shape = r"<think>.*?</think>\n<answer>.*?</answer>"
    assert pattern([text, [{"role": "assistant", "content": text}]], regex=shape) == [score, score]


def test_a_pattern_is_looked_for_in_a_tag_and_checked():
    texts = ["<answer> 12 </answer>", "<answer>1.5</answer>", "12"]
    assert pattern(texts, regex=r"\d+", tag="answer") == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"regex = '\('"):
        pattern(["a"], regex="(")


def test_fuzzy_match_is_the_share_of_common_characters():
    # kitten, sitting: 2 characters are deleted and 3 inserted of 6 + 7.
    completions = ["Sitting!", "kitten", "", "<answer>kitten</answer>"]
    assert fuzzy_match(completions, ["kitten"] * 3 + [None]) == [pytest.approx(8 / 13), 1.0, 0.0, None]
    assert fuzzy_match(completions, ["kitten"] * 4, min_similarity=0.7)[:3] == [0.0, 1.0, 0.0]
    assert fuzzy_match(completions, ["kitten"] * 4, tag="answer") == [0.0, 0.0, 0.0, 1.0]


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def test_json_is_validated_by_a_schema():
    completions = ['{"x": 1}', '```json\n{"x": 1}\n```', '{"x": 1.5}', '{"y": 1}', "x: 1", '{"x": NaN}', ""]
    assert json_schema(completions, POINT) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    of_tasks = [POINT, json.dumps(POINT), {"type": "string"}, None, POINT, {"type": "object"}, POINT]
    assert json_schema(completions, of_tasks) == [1.0, 1.0, 0.0, None, 0.0, 0.0, 0.0]
    assert json_schema(['so <out>{"x": 2}</out>'], POINT, tag="out") == [1.0]


def test_an_invalid_schema_is_named_and_other_documents_are_not_loaded():
    with pytest.raises(ValueError, match="invalid JSON schema: 'strange' is not valid"):
        json_schema(["1"], {"type": "strange"})
    with pytest.raises(ValueError, match="invalid JSON schema: "):
        json_schema(["1"], ["{"])
    with pytest.raises(Exception, match=r"Unresolvable: http://127\.0\.0\.1:9/other"):
        json_schema(["1"], {"$ref": "http://127.0.0.1:9/other"})


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(PACKAGES, "fuzzy_match", "not_installed")
    with pytest.raises(RewardError, match=r"package not_installed, .*pip install 'nemorl\[rewards\]'"):
        find_reward(FunctionRewardConfig(function="fuzzy_match"))
