"""Room for keys and values: it grows, keeps what it holds, and stays below its limit."""

import pytest
import torch

from nemorl.models.kv_cache import KVCache


def fill(cache, rows, length, first=0.0):
    """Distinct keys and values of two layers; [layers, 2, rows, length, heads, dim]."""
    values = torch.arange(first, first + 2 * 2 * rows * length * 4).view(2, 2, rows, length, 2, 2)
    slots = cache.slots(torch.arange(rows)[:, None], torch.arange(length)).flatten()
    for layer in range(2):
        cache.keep(layer, slots, *(one.flatten(0, 1) for one in values[layer]))
    return values


def held(cache, rows, length):
    """The same of what the cache holds."""
    layers = [[cache.tokens(layer, row, 0, length) for row in range(rows)] for layer in range(2)]
    return torch.stack([torch.stack(of_layer, 1) for of_layer in layers])


@pytest.mark.parametrize("empty", [0, 1])
def test_growing_keeps_what_the_rows_hold(empty):
    cache = KVCache(4096, empty)
    cache.reserve(2, 10)
    values = fill(cache, 2, 10)
    cache.reserve(5, 300)
    assert cache.rows >= 5
    assert cache.length >= 300
    assert torch.equal(held(cache, 2, 10), values)


@pytest.mark.parametrize("empty", [0, 1])
def test_it_never_holds_more_than_its_limit(empty):
    cache = KVCache(1000, empty)
    cache.reserve(1, 1)
    fill(cache, 1, 1)
    for rows, length in [(8, 20), (3, 100), (1, 1000), (50, 20), (7, 142), (10, 100)]:
        cache.reserve(rows, length)
        assert cache.num_tokens <= 1000
        assert len(held(cache, cache.rows, cache.length)[0, 0].flatten(0, 1)) == cache.num_tokens
        assert cache.rows >= rows
        assert cache.length >= length


def test_growth_is_rare():
    cache = KVCache(100_000)
    storages = set()
    for length in range(1, 1000):
        cache.reserve(4, length)
        storages.add(cache.length)
    assert len(storages) < 10


def test_more_than_the_limit_is_refused_with_the_field_to_change():
    cache = KVCache(100)
    assert cache.fits(4, 25)
    assert not cache.fits(4, 26)
    with pytest.raises(ValueError, match=r"may hold 100 tokens, and 4 rows of 26 tokens.*max_kv_tokens"):
        cache.reserve(4, 26)


def test_rows_are_copied_up_to_a_length():
    cache = KVCache(4096)
    cache.reserve(4, 8)
    fill(cache, cache.rows, cache.length)
    before = held(cache, cache.rows, cache.length)
    cache.copy_rows([3, 3], [0, 1], 5)
    after = held(cache, cache.rows, cache.length)
    for row in (0, 1):
        assert torch.equal(after[:, :, row, :5], before[:, :, 3, :5])
        assert torch.equal(after[:, :, row, 5:], before[:, :, row, 5:])
    assert torch.equal(after[:, :, 2:], before[:, :, 2:])
