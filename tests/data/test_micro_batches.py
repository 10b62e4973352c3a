from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemorl.data.prefixes import sequence_cost
from nemorl.data.shards import (
    BatchPlan,
    balance,
    micro_batches,
    plan_batch,
    plan_micro_batches,
)

MAX_TOKENS = 100
lengths = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=40)


@settings(deadline=None)
@given(lengths)
def test_micro_batches_hold_every_sequence_once_within_the_budget(tokens):
    groups = micro_batches(tokens, MAX_TOKENS)
    assert sorted(i for group in groups for i in group) == list(range(len(tokens)))
    assert all(0 < sum(tokens[i] for i in group) <= MAX_TOKENS for group in groups)
    # Two groups that fit together would have been one.
    assert all(sum(tokens[i] for i in a + b) > MAX_TOKENS for a, b in combinations(groups, 2))


def test_first_fit_decreasing_packs_tightly():
    assert micro_batches([30, 70, 50, 50], 100) == [[1, 0], [2, 3]]


def test_a_sequence_longer_than_the_budget_is_named():
    with pytest.raises(ValueError, match="sequence 1 has 101 tokens, a micro-batch takes 100"):
        micro_batches([3, 101], 100)


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=8, max_size=60), st.integers(1, 8))
def test_balance_gives_equal_counts_and_sums_within_the_largest_cost(costs, num_ranks):
    ranks = balance(costs, num_ranks)
    assert sorted(i for rank in ranks for i in rank) == list(range(len(costs)))
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    sums = [sum(costs[i] for i in rank) for rank in ranks]
    assert max(sums) - min(sums) <= max(costs)


def test_balance_finds_the_even_split_that_dealing_in_turn_misses():
    ranks = balance([8, 7, 6, 5, 4, 2], 2)
    assert sorted(sum([8, 7, 6, 5, 4, 2][i] for i in rank) for rank in ranks) == [16, 16]


@pytest.mark.parametrize(
    ("costs", "sums"),
    [
        ([7, 2, 6], [7, 8]),
        ([2, 10, 11, 4, 5], [16, 16]),
        ([6, 2, 4, 9, 6], [13, 14]),
        ([10, 2, 8, 10, 11, 6, 4], [25, 26]),
    ],
)
def test_balance_finds_the_best_split_of_uneven_counts(costs, sums):
    assert sorted(sum(costs[i] for i in rank) for rank in balance(costs, 2)) == sums


def test_interleaved_stages_get_a_micro_batch_each():
    plan = plan_batch([5, 5, 9, 1, 2, 3], 2, 1, MAX_TOKENS, hidden_size=64, fewest=3)
    assert [len(batches) for batches in plan.minibatches[0]] == [3, 3]
    with pytest.raises(ValueError, match="rank 0 has 3 sequences, but 4 interleaved stages require as many"):
        plan_batch([5, 5, 9, 1, 2, 3], 2, 1, MAX_TOKENS, hidden_size=64, fewest=4)
    with pytest.raises(ValueError, match="rank 0 has 1 sequences, but 2 interleaved stages require as many"):
        plan_micro_batches([[5]], MAX_TOKENS, fewest=2)


def test_metrics_of_a_plan_written_out():
    """Hidden size 1: a sequence of n tokens costs n * (12 + n)."""
    plan = BatchPlan(
        ranks=[[0, 2], [1, 3]],
        minibatches=[[[[0]], [[0]]], [[[1]], [[1]]]],
        costs=[[220, 64], [160, 160]],
        num_tokens=30,
        max_tokens=20,
    )
    metrics = plan.packing_metrics()
    assert metrics == {
        "packing/imbalance": pytest.approx((220 + 160) / ((220 + 64) / 2 + 160)),
        "packing/fill": pytest.approx(30 / 80),
        "packing/micro_batches": 2.0,
    }
    even = plan_batch([8] * 4, 2, 2, 8, hidden_size=1)
    assert even.packing_metrics() == {
        "packing/imbalance": 1.0, "packing/fill": 1.0, "packing/micro_batches": 2.0,
    }  # fmt: skip


def test_fewer_sequences_than_ranks_are_refused():
    with pytest.raises(ValueError, match="2 sequences cannot occupy 3 data-parallel ranks"):
        balance([1, 1], 3)


@settings(deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda ranks: st.integers(1, 8).flatmap(
            lambda count: st.lists(
                st.lists(st.integers(1, MAX_TOKENS), min_size=count, max_size=count),
                min_size=ranks,
                max_size=ranks,
            )
        )
    )
)
def test_ranks_get_equally_many_micro_batches_and_none_is_empty(per_rank):
    plans = plan_micro_batches(per_rank, MAX_TOKENS)
    assert len({len(plan) for plan in plans}) == 1
    # No more than the rank in greatest need asks for.
    assert len(plans[0]) == max(len(micro_batches(tokens, MAX_TOKENS)) for tokens in per_rank)
    for tokens, plan in zip(per_rank, plans, strict=True):
        assert sorted(i for batch in plan for i in batch) == list(range(len(tokens)))
        assert all(0 < sum(tokens[i] for i in batch) <= MAX_TOKENS for batch in plan)


def test_a_rank_with_too_few_sequences_is_named():
    with pytest.raises(ValueError, match="rank 1 has 1 sequences, but another rank needs 2 micro-batches"):
        plan_micro_batches([[80, 80], [10]], 100)
    with pytest.raises(ValueError, match="rank 1 has 0 sequences, but another rank needs 1 micro-batches"):
        plan_micro_batches([[80], []], 100)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, MAX_TOKENS), min_size=24, max_size=24),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
)
def test_a_plan_lays_each_sequence_on_one_rank_and_one_micro_batch(tokens, num_minibatches, num_ranks):
    plan = plan_batch(tokens, num_ranks, num_minibatches, MAX_TOKENS, hidden_size=64)
    assert sorted(i for rank in plan.ranks for i in rank) == list(range(24))
    assert len(plan.minibatches) == num_minibatches
    size = 24 // num_minibatches
    for number, minibatch in enumerate(plan.minibatches):
        seen = [
            plan.ranks[rank][place] for rank, batches in enumerate(minibatch) for b in batches for place in b
        ]
        assert sorted(seen) == list(range(number * size, (number + 1) * size))
        assert len({len(batches) for batches in minibatch}) == 1
    # The rank holds its sequences minibatch by minibatch, so places run through without a gap.
    for rank, held in enumerate(plan.ranks):
        places = [p for minibatch in plan.minibatches for batch in minibatch[rank] for p in batch]
        assert sorted(places) == list(range(len(held)))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=8, max_size=8),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
)
def test_units_lie_in_one_micro_batch_of_their_minibatch(pairs, num_minibatches, num_ranks):
    lengths = [length for pair in pairs for length in pair]
    units = [unit for unit in range(8) for _ in range(2)]
    plan = plan_batch(lengths, num_ranks, num_minibatches, MAX_TOKENS, hidden_size=64, units=units)
    size = 8 // num_minibatches
    for number, minibatch in enumerate(plan.minibatches):
        seen = []
        for rank, batches in enumerate(minibatch):
            for batch in batches:
                sequences = [plan.ranks[rank][place] for place in batch]
                assert sum(lengths[i] for i in sequences) <= MAX_TOKENS
                seen.append(sorted(units[i] for i in sequences))
        # Both of a pair stand in the same list.
        assert all(batch.count(unit) == 2 for batch in seen for unit in batch)
        assert sorted(unit for batch in seen for unit in batch[::2]) == [
            *range(number * size, (number + 1) * size)
        ]


def of_groups(num_groups: int, seed: int) -> tuple[list[int], list[int]]:
    """Lengths of 16 samples of each group, and the group of each; some groups are harder than others."""
    random = Random(seed)
    tasks = [random.gauss(5.5, 0.4) for _ in range(num_groups)]
    lengths = [100 + min(1900, int(random.lognormvariate(mean, 0.7))) for mean in tasks for _ in range(16)]
    return lengths, [group for group in range(num_groups) for _ in range(16)]


@pytest.mark.parametrize("num_ranks", [16, 20, 67, 128])
@pytest.mark.parametrize("hidden_size", [64, 4096])
def test_many_ranks_read_few_stores_and_are_as_balanced_as_without_stores(num_ranks, hidden_size):
    lengths, stores = of_groups(3 * num_ranks + 5, seed=num_ranks)
    plans = [plan_batch(lengths, num_ranks, 1, 32768, hidden_size, stores=known) for known in (None, stores)]
    flat, near = (sum(len({stores[i] for i in held}) for held in plan.ranks) for plan in plans)
    assert 2 * near < flat
    for plan in plans:
        assert sorted(i for held in plan.ranks for i in held) == list(range(len(lengths)))
        assert max(map(len, plan.ranks)) - min(map(len, plan.ranks)) <= 1
    imbalance, of_near = (plan.packing_metrics()["packing/imbalance"] for plan in plans)
    assert of_near <= 1.005 * imbalance


def test_the_balance_comes_before_few_stores():
    lengths = [2000] * 16 + [100] * 240  # one of the groups has all the work
    stores = [group for group in range(16) for _ in range(16)]
    plan = plan_batch(lengths, 16, 1, 32768, 64, stores=stores)
    assert sorted(sum(lengths[i] for i in held) for held in plan.ranks) == [2000 + 1500] * 16


def test_stores_of_unequal_size_and_fewer_stores_than_ranks():
    lengths, _ = of_groups(32, seed=1)
    several_groups = [min(store, 20) for store in range(32) for _ in range(16)]  # the last one has twelve
    for stores in (several_groups, [0] * len(lengths), list(range(len(lengths)))):
        plan = plan_batch(lengths, 16, 2, 32768, 64, stores=stores)
        assert sorted(i for held in plan.ranks for i in held) == list(range(len(lengths)))
        assert {len(held) for held in plan.ranks} == {32}


def test_a_unit_longer_than_the_budget_is_refused():
    with pytest.raises(ValueError, match="has 120 tokens, a micro-batch takes 100"):
        plan_batch([60, 60], 1, 1, 100, 64, units=[0, 0])


def test_minibatches_must_divide_the_batch():
    with pytest.raises(ValueError, match="10 sequences do not divide into 3 minibatches"):
        plan_batch([1] * 10, 1, 3, 100, 64)


def test_cost_counts_attention_next_to_the_matrices():
    # 12*h*n + n*n: at n = 12*h the attention costs as much as the matrices.
    assert sequence_cost(768, 64) == 2 * 12 * 64 * 768
