import pytest

from nemorl.rewards.functions import exact_match, format_tags


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
