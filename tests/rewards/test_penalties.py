"""Penalties against their formulas, written out with fractions."""

from fractions import Fraction

import pytest

from nemorl.rewards.functions import (
    constant,
    length_penalty,
    overlong_penalty,
    relative_length,
    repetition_penalty,
)


def of_lengths(*lengths):
    return [list(range(length)) for length in lengths]


def test_overlong_answers_are_scored_as_in_dapos_equation_13():
    lengths = [0, 59, 60, 61, 75, 99, 100, 101, 500]
    expected = []
    for length in lengths:
        if length <= 100 - 40:
            expected.append(Fraction(0))
        elif length <= 100:
            expected.append(Fraction((100 - 40) - length, 40))
        else:
            expected.append(Fraction(-1))
    paid = overlong_penalty(of_lengths(*lengths), max_length=100, buffer=40)
    assert paid == pytest.approx([float(value) for value in expected], abs=1e-15)
    assert expected[4] == Fraction(-3, 8)


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(ValueError, match=f"buffer = {buffer} is not between 1 and max_length = 100"):
        overlong_penalty([[1]], max_length=100, buffer=buffer)


def test_every_answer_is_worth_the_same():
    assert constant([[1, 2], [3]]) == [1.0, 1.0]


def test_every_token_costs_the_same():
    assert length_penalty(of_lengths(0, 5, 20, 30), max_length=20) == [0.0, -0.25, -1.0, -1.0]


def test_short_right_answers_are_rewarded_and_short_wrong_ones_are_not():
    """Kimi's lambda is 1/2, 1/4 and -1/2 for 2, 3 and 6 tokens."""
    ids = of_lengths(2, 3, 6, 2, 6)
    said = ["4", "4", "4", "5", "5"]
    assert relative_length(said, ids, ["4"] * 5) == [0.5, 0.25, -0.5, 0.0, -0.5]
    assert relative_length(["4", "5"], of_lengths(3, 3), ["4", "4"]) == [0.0, 0.0]
    assert relative_length(["4"], of_lengths(3), [None]) == [None]


def test_what_is_said_again_costs_its_share():
    ids = [
        [1, 2, 3, 4, 5],  # (1 2) (2 3) (3 4) (4 5)
        [1, 2, 1, 2, 1],  # (1 2) (2 1) (1 2) (2 1): two of four are new
        [7, 7, 7, 7, 7, 7],  # five times (7 7)
        [7],
        [],
    ]
    assert repetition_penalty(ids, n=2) == pytest.approx([0.0, 2 / 4 - 1, 1 / 5 - 1, 0.0, 0.0])
    assert repetition_penalty([[1, 2, 3, 1, 2, 3, 4]]) == pytest.approx([4 / 5 - 1])
    with pytest.raises(ValueError, match="n = 0"):
        repetition_penalty(ids, n=0)
