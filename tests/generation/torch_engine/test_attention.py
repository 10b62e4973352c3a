"""Attention against the formula, and rows that do not feel each other."""

import pytest
import torch

from nemorl.generation.torch_engine.engine import (
    ROW_MULTIPLE,
    DecodeAttention,
    Linear,
    PrefillAttention,
)
from nemorl.models.kv_cache import KVCache

HEADS, KV_HEADS, DIM = 9, 3, 64  # SmolLM2's


def attend(query, keys, values):
    """One query [heads, D] over keys and values [T, kv_heads, D], head by head -> [heads * D]."""
    heads = []
    for head in range(len(query)):
        shared = head // (len(query) // keys.shape[1])
        weights = torch.softmax(keys[:, shared] @ query[head] / query.shape[1] ** 0.5, dim=0)
        heads.append(weights @ values[:, shared])
    return torch.cat(heads)


def filled_cache(rows, length):
    """A cache with random contents, as after prefills of that length."""
    cache = KVCache(10**6)
    cache.reserve(rows, length)
    generator = torch.Generator().manual_seed(0)
    slots = cache.slots(torch.arange(rows)[:, None], torch.arange(length)).flatten()
    cache.keep(0, slots, *torch.randn(2, rows * length, KV_HEADS, DIM, generator=generator))
    return cache


def new_tokens(rows):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def test_a_step_attends_to_each_row_up_to_its_own_token():
    cache, positions = filled_cache(5, 300), torch.tensor([0, 7, 63, 64, 299])
    query, key, value = new_tokens(8)  # three rows of padding
    before = [cache.tokens(0, row, 0, 300).clone() for row in range(5)]  # [2, 300, kv_heads, D] each
    got = DecodeAttention(cache, positions, 300, torch.float32)(0, query, key, value)
    for row, position in enumerate(positions.tolist()):
        keys, values = before[row][:, :position]
        keys, values = torch.cat((keys, key[row, None])), torch.cat((values, value[row, None]))
        torch.testing.assert_close(got[row], attend(query[row], keys, values), atol=1e-5, rtol=0)
    assert torch.equal(got[5:], torch.zeros(3, HEADS * DIM))


def test_a_prefill_attends_within_each_prompt_and_fills_every_row_that_shares_it():
    length, cache = 16, filled_cache(4, 12)  # the padding reaches beyond the cache's need
    query, key, value = new_tokens(2 * length)
    rows, owners = torch.tensor([3, 0, 1]), torch.tensor([1, 0, 1])
    attention = PrefillAttention(cache, 2, length, rows, owners)
    got = attention(0, query, key, value).view(2, length, -1)
    keys, values = key.view(2, length, KV_HEADS, DIM), value.view(2, length, KV_HEADS, DIM)
    for prompt in range(2):
        for last in (0, 5, 15):
            want = attend(
                query.view(2, length, HEADS, DIM)[prompt, last],
                *(x[prompt, : last + 1] for x in (keys, values)),
            )
            torch.testing.assert_close(got[prompt, last], want, atol=1e-5, rtol=0)
    for row, prompt in ((3, 1), (0, 0), (1, 1)):
        assert torch.equal(cache.tokens(0, row, 0, 16), torch.stack((keys[prompt], values[prompt])))


@pytest.fixture
def _two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


# On the processors tried the rows are equal to the bit; kernels of another one may round differently.
ROUNDING = {"rtol": 0.0, "atol": 2e-6}


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("length", [40, 150, 190, 250, 330, 500, 700])
def test_a_row_rounds_the_same_no_matter_who_shares_its_step(length):
    cache = filled_cache(16, 1400)
    query, key, value = new_tokens(16)

    def step(rows, longest):
        positions = torch.tensor([length - 1, *[longest - 1] * (rows - 1)])
        return DecodeAttention(cache, positions, longest, torch.float32)(
            0, query[:rows], key[:rows], value[:rows]
        )[0]

    alone = step(1, length)
    for rows in (2, 3, 5, 8, 16):
        for longest in (length, 200, 260, 330, 400, 520, 700, 800, 1400):
            if longest >= length:
                torch.testing.assert_close(step(rows, longest), alone, **ROUNDING)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 1536), (97, 32)])
def test_a_row_of_a_product_rounds_the_same_whatever_the_number_of_rows(outputs, inputs):
    generator = torch.Generator().manual_seed(0)
    linear = Linear(
        torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    )
    x = torch.randn(512, inputs, generator=generator)
    whole = linear(x)
    for rows in range(ROW_MULTIPLE, 65, ROW_MULTIPLE):
        torch.testing.assert_close(linear(x[:rows]), whole[:rows], rtol=0.0, atol=1e-4)
