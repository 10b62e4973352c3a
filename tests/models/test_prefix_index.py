"""Which pages begin a sequence, and which are lost first."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nemorl.models.kv_cache import PAGE_TOKENS, PrefixIndex


def tokens(*pages, more=0):
    """A page of each number, and `more` tokens."""
    return np.array([p for p in pages for _ in range(PAGE_TOKENS)] + [99] * more, np.int32)


def test_pages_are_shared_by_common_beginnings():
    index = PrefixIndex(10)
    assert index.add(tokens(1, 2, 3, more=1)) == (0, [0, 1, 2])
    assert index.add(tokens(1, 2, 4)) == (2, [3])
    assert index.find(tokens(1, 2, 3, more=3)) == ([0, 1, 2], None)
    assert index.find(tokens(1, 2, 4, 5, more=1))[0] == [0, 1, 3]
    assert index.find(tokens(2, 3, more=1))[0] == [], "a page counts with those before it only"


def test_one_token_is_always_left_to_read():
    index = PrefixIndex(10)
    index.add(tokens(1, 2))
    assert index.find(tokens(1, 2))[0] == [0]
    assert index.find(tokens(1, 2, more=1))[0] == [0, 1]
    assert index.find(tokens(1)[:1])[0] == []


def test_what_follows_is_the_same_for_prompts_with_a_common_beginning():
    index = PrefixIndex(10)
    index.add(tokens(1))
    _, one = index.find(tokens(1, 2, more=1))
    _, other = index.find(tokens(1, 2, 3, more=1))
    _, third = index.find(tokens(1, 3, more=1))
    assert one == other != third
    assert index.find(tokens(1, more=1)) == ([0], None)


def test_the_least_recently_used_page_is_lost_first_and_never_before_those_behind_it():
    index = PrefixIndex(4)
    index.add(tokens(1, 2))
    index.add(tokens(3, 4))
    index.find(tokens(1, 2, more=1))
    assert index.add(tokens(5)) == (0, [3]), "of 3, 4 the last"
    assert index.find(tokens(3, 4, more=1))[0] == [2]
    assert index.find(tokens(1, 2, more=1))[0] == [0, 1]


def test_without_pages_nothing_is_known():
    index = PrefixIndex(0)
    assert index.add(tokens(1, 2)) == (0, [])
    assert index.find(tokens(1, 2)) == ([], None)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=30), st.integers(1, 6))
def test_a_page_has_one_meaning_at_a_time(texts, num_pages):
    index, held = PrefixIndex(num_pages), {}
    for text in texts:
        sequence = tokens(*text, more=1)
        pages, _ = index.find(sequence)
        assert [held[page] for page in pages] == [tuple(text[: i + 1]) for i in range(len(pages))]
        first, added = index.add(sequence)
        assert first >= len(pages)
        for place, page in enumerate(added, start=first):
            held[page] = tuple(text[: place + 1])
        assert len(index.find(sequence)[0]) == min(len(text), num_pages)
    index.clear()
    assert all(index.find(tokens(*text, more=1))[0] == [] for text in texts)
