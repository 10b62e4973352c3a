"""Room for keys and values: it grows, keeps what it holds, and stays below its limit."""

import pytest
import torch

from nemorl.generation.torch_engine.model import KVCache


def make_cache(max_tokens):
    return KVCache(2, 4, max_tokens, torch.device("cpu"), torch.float32)


def test_growing_keeps_what_the_rows_hold():
    cache = make_cache(4096)
    cache.reserve(2, 10)
    for index, layer in enumerate(cache.layers):
        layer[:, :2, :10] = torch.arange(160.0).view(2, 2, 10, 4) + index
    cache.reserve(5, 300)
    for index, layer in enumerate(cache.layers):
        assert layer.shape[1] >= 5
        assert layer.shape[2] >= 300
        assert torch.equal(layer[:, :2, :10], torch.arange(160.0).view(2, 2, 10, 4) + index)


def test_it_never_holds_more_than_its_limit():
    cache = make_cache(1000)
    for rows, length in [(8, 20), (3, 100), (1, 1000), (50, 20), (7, 142), (10, 100)]:
        cache.reserve(rows, length)
        assert cache.num_tokens <= 1000
        assert cache.layers[0].shape[1:3].numel() == cache.num_tokens
        assert cache.layers[0].shape[1] >= rows
        assert cache.length >= length


def test_growth_is_rare():
    cache = make_cache(100_000)
    storages = set()
    for length in range(1, 1000):
        cache.reserve(4, length)
        storages.add(cache.length)
    assert len(storages) < 10


def test_more_than_the_limit_is_refused_with_the_field_to_change():
    cache = make_cache(100)
    assert cache.fits(4, 25)
    assert not cache.fits(4, 26)
    with pytest.raises(ValueError, match=r"may hold 100 tokens, and 4 rows of 26 tokens.*max_kv_tokens"):
        cache.reserve(4, 26)


def test_rows_are_copied_up_to_a_length():
    cache = make_cache(4096)
    cache.reserve(4, 8)
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in cache.layers]
    cache.copy_rows([3, 3], [0, 1], 5)
    for layer, old in zip(cache.layers, before, strict=True):
        for row in (0, 1):
            assert torch.equal(layer[:, row, :5], old[:, 3, :5])
            assert torch.equal(layer[:, row, 5:], old[:, row, 5:])
        assert torch.equal(layer[:, 2:], old[:, 2:])
