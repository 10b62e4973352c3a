"""Drawing: the distribution, its filters, and numbers that depend on seed and position alone."""

import math

import numpy as np
import pytest
import torch

from nemorl.device import upload
from nemorl.generation.sampling import Sampler, _splitmix64, uniform
from nemorl.generation.types import SamplingParams

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0, 1.5, -4.0, 2.5, 1.0, -0.5])


def sample(logits, params, seeds, positions=None):
    """One draw per row of `logits`."""
    sampler = Sampler(params, seeds, CPU)
    (bits,) = upload(CPU, sampler.uniform_bits(positions or [0] * len(logits)))
    return sampler(logits, bits)


def allowed_by_loop(logits, params):
    """The distribution written out token by token: temperature, then top-k, top-p, min-p."""
    weights = [math.exp(x / params.temperature) for x in logits.tolist()]
    ranked = sorted(range(len(weights)), key=lambda i: -weights[i])
    if params.top_k is not None:
        ranked = ranked[: params.top_k]
    total = sum(weights[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        kept.append(i)
        mass += weights[i] / total
        if mass >= params.top_p:
            break
    kept = [i for i in kept if weights[i] >= params.min_p * weights[kept[0]]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=4),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.1),
    SamplingParams(top_k=1),
    SamplingParams(top_k=50),
    SamplingParams(top_p=1e-6),
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_frequencies_and_logprobs_are_those_of_the_filtered_distribution(params):
    draws = 20_000
    got = sample(LOGITS.repeat(draws, 1), [params] * draws, range(draws))
    want = allowed_by_loop(LOGITS, params)
    counts = np.bincount(got.tokens.numpy(), minlength=len(LOGITS))
    assert set(np.flatnonzero(counts)) <= set(want)
    # Pearson's statistic has mean k-1 and deviation sqrt(2(k-1)); with fixed seeds it never flickers.
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in want.items())
    freedom = len(want) - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom)
    logprobs = torch.tensor([math.log(want[token]) for token in got.tokens.tolist()])
    torch.testing.assert_close(got.logprobs, logprobs, atol=1e-5, rtol=0)


def test_every_row_follows_its_own_parameters():
    params = [*CASES, SamplingParams(temperature=0.0), *CASES]
    logits = torch.randn(len(params), 40, generator=torch.Generator().manual_seed(0))
    seeds = [100 + row for row in range(len(params))]
    together = sample(logits, params, seeds)
    for row, one in enumerate(params):
        alone = sample(logits[row : row + 1], [one], [seeds[row]])
        assert together.tokens[row] == alone.tokens[0]
        assert together.logprobs[row] == pytest.approx(alone.logprobs[0].item(), abs=1e-6)


def test_greedy_takes_the_largest_and_reports_the_unfiltered_logprob():
    params = SamplingParams(temperature=0.0, top_k=2, top_p=0.5)
    got = sample(LOGITS.unsqueeze(0), [params], [3])
    assert got.tokens.tolist() == [3]
    assert got.logprobs[0].item() == pytest.approx(LOGITS.log_softmax(0)[3].item(), abs=1e-6)


def test_a_flat_distribution_over_a_large_vocabulary_needs_more_than_the_first_candidates():
    vocabulary = 20_000
    logits = -1e-9 * torch.arange(vocabulary).expand(2, -1)  # of equal ones all would be kept
    logits[:, 0] = 1.0
    draws = [
        sample(logits, [SamplingParams(top_p=0.9), SamplingParams(top_k=3000)], [s, s]) for s in range(20)
    ]
    mass = vocabulary - 1 + math.e
    kept = 1 + math.ceil(0.9 * mass - math.e)  # tokens behind the first that reach 0.9 of the mass
    for got in draws:
        weights = [math.e if token == 0 else 1.0 for token in got.tokens.tolist()]
        assert got.logprobs[0].item() == pytest.approx(math.log(weights[0] / (kept - 1 + math.e)), abs=1e-3)
        assert got.logprobs[1].item() == pytest.approx(math.log(weights[1] / (2999 + math.e)), abs=1e-4)
    assert len({got.tokens[0].item() for got in draws}) > 15


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 2, "top_p": 0.7}], ids=str)
def test_tokens_as_likely_as_the_last_one_kept_are_kept(filters):
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, -1.0, 1.0]]).log_softmax(-1)
    kept = math.e + 3
    draws = [sample(logits, [SamplingParams(**filters)], [seed]) for seed in range(60)]
    assert {got.tokens.item() for got in draws} == {1, 2, 3, 5}
    for got in draws:
        weight = math.e if got.tokens.item() == 1 else 1.0
        assert got.logprobs.item() == pytest.approx(math.log(weight / kept), abs=1e-5)


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((4096, 50), float("-inf"))
    logits[:, 17] = 0.0
    logits[:, 31] = -30.0
    got = sample(logits, [SamplingParams()] * 4096, range(4096))
    assert set(got.tokens.tolist()) == {17}
    assert torch.isfinite(got.logprobs).all()


def test_the_hash_is_splitmix64():
    # First outputs of splitmix64 seeded with 1234567, from Vigna's reference implementation.
    step = 0x9E3779B97F4A7C15
    states = np.array([1234567, (1234567 + step) % 2**64], dtype=np.uint64)
    assert _splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973]


def test_uniform_numbers_are_uniform_over_seeds_and_positions_and_never_one():
    seeds = np.arange(200, dtype=np.uint64).repeat(200)
    positions = np.tile(np.arange(200, dtype=np.uint64), 200)
    numbers = uniform(seeds, positions)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 19 + 4 * math.sqrt(38)
    grid = numbers.reshape(200, 200)
    assert abs(np.corrcoef(grid[:, 0], grid[:, 1])[0, 1]) < 0.25
    assert abs(np.corrcoef(grid[0], grid[1])[0, 1]) < 0.25


def test_what_is_drawn_depends_on_seed_and_position_only():
    logits = torch.zeros(1, 1000)

    def draw(seed, position):
        return sample(logits, [SamplingParams()], [seed], [position]).tokens.item()

    assert draw(5, 3) == draw(5, 3)
    assert len({draw(5, position) for position in range(20)}) > 15
    assert len({draw(seed, 3) for seed in range(20)}) > 15
    assert draw(2**63 - 1, 0) != draw(0, 0)


@pytest.mark.parametrize("params", [*CASES, SamplingParams(temperature=0.0)], ids=str)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_named(params, broken):
    logits = LOGITS.repeat(2, 1)
    sample(logits, [params] * 2, [1, 2]).read()
    logits[1, slice(None) if broken < 0 else 3] = broken
    with pytest.raises(FloatingPointError, match="its weights are broken"):
        sample(logits, [params] * 2, [1, 2]).read()


def test_both_results_are_read_in_one_copy():
    got = sample(LOGITS.repeat(3, 1), CASES[:3], [1, 2, 3])
    tokens, logprobs = got.read()
    assert (tokens, logprobs) == (got.tokens.tolist(), got.logprobs.tolist())
