"""Prompt lookup: what is drafted, and when nothing is; what a row of a step costs."""

import numpy as np
import pytest

from nemorl.config.generation import PromptLookupConfig
from nemorl.generation.drafts import PromptLookup, StepCost


def drafter(*tokens, **config):
    return PromptLookup(PromptLookupConfig(**config), np.array(tokens, np.int32))


def test_what_followed_the_last_tokens_is_drafted():
    assert drafter(1, 2, 3, 4, 5, 9, 1, 2, max_tokens=3).draft(8, worth=0.01) == [3, 4, 5]


def test_the_longest_match_counts_and_of_several_the_last():
    assert drafter(1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3, max_tokens=1).draft(8, worth=0.01) == [7]
    assert drafter(2, 3, 7, 2, 3, 8, 2, 3, max_tokens=1).draft(8, worth=0.01) == [8]


def test_text_that_repeats_itself_is_continued():
    assert drafter(1, 2, 1, 2, 1, 2, max_tokens=5).draft(8, worth=0.01) == [1, 2, 1, 2, 1]
    assert drafter(4, 4, 4, 4, max_tokens=3).draft(8, worth=0.01) == [4, 4, 4]


def test_bytes_of_neighbors_are_no_token():
    # 0x01000000 and 0x00000001 share bytes across their border.
    text = (0x01000000, 0x01000000, 5, 0x00000001, 0x00000001, 7)
    assert drafter(*text, 0x00010000, 0x00010000).draft(8, worth=0.01) == []


@pytest.mark.parametrize("tokens", [(), (1,), (1, 2), (1, 2, 3, 4, 5)])
def test_without_a_match_there_is_no_draft(tokens):
    assert drafter(*tokens).draft(8, worth=0.01) == []


def test_a_draft_is_as_long_as_it_is_expected_to_be_right():
    text = [1, 2, 3, 4] * 5
    one = drafter(*text)
    assert len(one.draft(3, worth=0.01)) == 3, "no more than its limit"
    assert len(one.draft(99, worth=0.01)) == 8
    assert one.draft(0, worth=0.01) == []
    assert len(one.draft(8, worth=0.6)) == 1, "0.75 is worth it, its square is not"
    assert one.draft(8, worth=1.0) == []
    assert len(one.draft(8, worth=0.0)) == 8
    for _ in range(5):
        one.update([9], drafted=1, right=0)
    assert one.acceptance.rate == pytest.approx(1.5 / 7)
    one.update([1, 2, 3], drafted=0, right=0)
    assert one.draft(8, worth=0.6) == []
    for _ in range(200):
        one.draft(8, worth=0.6)
    assert one.draft(8, worth=0.6) == [4], "it is tried again"


def test_right_drafts_grow():
    one = drafter(*[1, 2, 3, 4] * 5)
    for _ in range(4):
        draft = one.draft(8, worth=0.5)
        one.update([*draft, (draft[-1] % 4) + 1], drafted=len(draft), right=len(draft))
    assert len(one.draft(8, worth=0.5)) > 3


def test_the_cost_of_a_row_is_that_of_the_measured_steps():
    cost = StepCost(cheap_rows=8)
    assert cost.share(8) == 0.5
    for rows in (16, 40, 24, 64, 8) * 20:
        cost.update(rows, 0.09 + 0.001 * rows)
    for rows in (1, 10, 90):
        assert cost.share(rows) == pytest.approx(rows / (rows + 90), rel=0.05)
    for rows in (16, 40, 24, 64, 8) * 80:  # other sequences are longer now, and attention takes more
        cost.update(rows, 0.01 * rows)
    assert cost.share(10) == pytest.approx(1, abs=0.05)


def test_steps_of_one_size_say_nothing_about_the_cost_of_a_row():
    cost = StepCost(cheap_rows=8)
    for _ in range(50):
        cost.update(16, 0.3)
    assert cost.share(16) == pytest.approx(16 / 24)
    assert cost.share(4) == pytest.approx(4 / 12)


def test_a_row_takes_no_less_than_no_time_and_no_more_than_its_share():
    cost = StepCost(cheap_rows=8)
    for rows, seconds in ((10, 2.0), (40, 1.0)) * 30:
        cost.update(rows, seconds)
    assert cost.share(20) == 0
    for rows, seconds in ((10, 1.0), (40, 9.0)) * 300:
        cost.update(rows, seconds)
    assert cost.share(20) == pytest.approx(1)
