"""Attention against the formula, and rows that do not feel each other."""

import numpy as np
import pytest
import torch

from nemorl.generation.torch_engine.engine import (
    ROW_MULTIPLE,
    ContinuedAttention,
    Linear,
    PrefillAttention,
)
from nemorl.models.kv_cache import (
    Beginning,
    CachedPass,
    ContinuedRows,
    KVCache,
    Prompt,
    StepTokens,
    next_tokens,
    padded_slots,
    rest_of_prompts,
)

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


def step_attention(cache, positions, longest, counts=None, beginnings=()):
    counts = counts or [1] * len(positions)
    uploaded = positions, positions, torch.from_numpy(padded_slots(counts))
    step = StepTokens([], [*positions.tolist(), longest - 1], counts, uploaded, beginnings)
    return ContinuedAttention(next_tokens(cache, step, torch.float32))


def test_a_step_attends_to_each_row_up_to_its_own_token():
    cache, positions = filled_cache(5, 300), torch.tensor([0, 7, 63, 64, 299])
    query, key, value = new_tokens(8)  # three rows of padding
    before = [cache.tokens(0, row, 0, 300).clone() for row in range(5)]  # [2, 300, kv_heads, D] each
    got = step_attention(cache, positions, 300)(0, query, key, value)
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
        return step_attention(cache, positions, longest)(0, query[:rows], key[:rows], value[:rows])[0]

    alone = step(1, length)
    for rows in (2, 3, 5, 8, 16):
        for longest in (length, 200, 260, 330, 400, 520, 700, 800, 1400):
            if longest >= length:
                torch.testing.assert_close(step(rows, longest), alone, **ROUNDING)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("counts", [[1, 4, 2], [3, 3], [9], [1, 17]])
def test_several_tokens_of_a_row_are_those_of_a_step_for_each(counts):
    """Drafts, and the rest of a prompt whose beginning is cached."""
    starts = [150, 37, 255][: len(counts)]
    query, key, value = new_tokens(sum(counts))
    positions = torch.cat([torch.arange(n) + start for start, n in zip(starts, counts, strict=True)])
    together = step_attention(filled_cache(3, 300), positions, 300, counts)(0, query, key, value)

    cache, one_by_one = filled_cache(3, 300), []
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    for token, (row, at) in enumerate(zip(rows, positions, strict=True)):
        alone = ContinuedRows(cache, range(row, row + 1), 1, at[None], 300, torch.float32)
        step = CachedPass(cache, cache.slots(torch.tensor([row]), at[None]), None, [alone])
        one_by_one.append(ContinuedAttention(step)(0, *(x[token, None] for x in (query, key, value))))
    torch.testing.assert_close(together, torch.cat(one_by_one), **ROUNDING)


@pytest.mark.parametrize("counts", [[1, 1, 1, 1, 1], [1, 4, 2, 1, 3]])
def test_what_rows_begin_with_is_read_once_and_they_attend_as_to_rows_of_their_own(counts):
    """In rows 1 and 4 what lies before the first multiple of 64 is never read, and may be anything."""
    beginnings = [Beginning([3, 0, 1], 1500), Beginning([2, 4], 1430)]
    starts = [1500, 1523, 1431, 1590, 1430]
    cache = filled_cache(5, 1600)
    cache.copy_rows([3, 3], [0, 1], 1500)
    cache.copy_rows([2], [4], 1430)
    query, key, value = new_tokens(sum(counts))
    positions = torch.cat([torch.arange(n) + start for start, n in zip(starts, counts, strict=True)])
    own = step_attention(cache, positions, 1600, counts)(0, query, key, value)
    for row in (1, 4):
        cache.tokens(0, row, 0, 1430 // 64 * 64).fill_(torch.nan)
    shared = step_attention(cache, positions, 1600, counts, beginnings)(0, query, key, value)
    torch.testing.assert_close(shared, own, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("length", [24, 70, 130, 200, 400, 600])
def test_a_prompt_rounds_the_same_whether_its_beginning_is_cached_or_not(length):
    query, key, value = new_tokens(length)
    whole = KVCache(10**6)
    whole.reserve(2, length + 8)
    zero = torch.zeros(1, dtype=torch.int64)
    want = PrefillAttention(whole, 1, length, zero, zero)(0, query, key, value)
    for start in (8, length // 2, length - 1):
        cache = KVCache(10**6)
        cache.reserve(2, length + 8)
        cache.keep(0, cache.slots(zero + 1, torch.arange(start)), key[:start], value[:start])
        prompt = Prompt(np.zeros(length, np.int32), [1], start)
        positions, cached = rest_of_prompts(cache, [prompt], torch.device("cpu"), torch.float32)
        assert positions.tolist() == list(range(start, length))
        got = ContinuedAttention(cached)(0, query[start:], key[start:], value[start:])
        torch.testing.assert_close(got, want[start:], **ROUNDING)
        assert torch.equal(cache.tokens(0, 1, 0, length), whole.tokens(0, 0, 0, length))


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
