"""Prefix trees against the sets of distinct beginnings of sequences."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemorl.data.prefixes import Run, Segment, Work, prefix_tree, sequence_cost, shared_runs, token_rows
from nemorl.data.shards import plan_batch

# Few different tokens, so that beginnings are often the same.
sequences = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda tokens: np.array(tokens, np.int32)),
    min_size=1,
    max_size=12,
)


def num_beginnings(tokens: list[np.ndarray]) -> int:
    """Different beginnings of sequences: the nodes of their trie."""
    return len({tuple(sequence[:end]) for sequence in tokens for end in range(1, len(sequence) + 1)})


def path(tree: list[Segment], number: int) -> list[Segment]:
    return [segment for segment in tree if number in segment.sequences]


@settings(deadline=None)
@given(sequences, st.integers(1, 4))
def test_a_tree_has_each_beginning_once(tokens, shortest):
    tree = prefix_tree(tokens, shortest)
    for number, sequence in enumerate(tokens):
        way = path(tree, number)
        assert [segment.start for segment in way] == [0, *(segment.end for segment in way[:-1])]
        assert way[-1].end == len(sequence)
        for segment in way:  # its sequences are equal as far as it reaches
            assert {tuple(tokens[other][: segment.end]) for other in segment.sequences} == {
                tuple(sequence[: segment.end])
            }
        assert [tree.index(segment) for segment in way[:-1]] == [segment.parent for segment in way[1:]]
        assert way[0].parent == -1
    assert all(segment.length >= shortest or len(segment.sequences) == 1 for segment in tree)
    count = sum(segment.length for segment in tree)
    if shortest == 1:
        # Equal sequences of one token more or less are one segment.
        assert count == num_beginnings(tokens)
    assert num_beginnings(tokens) <= count <= sum(map(len, tokens))


@settings(deadline=None)
@given(sequences)
def test_what_follows_a_segment_lies_next_to_it(tokens):
    tree = prefix_tree(tokens)
    for number in range(len(tree)):
        after = [
            other
            for other, segment in enumerate(tree)
            if set(segment.sequences) <= set(tree[number].sequences) and segment.start >= tree[number].end
        ]
        assert after == list(range(number + 1, number + 1 + len(after)))


def test_sequences_without_company_come_first_and_branches_by_length():
    tokens = [np.array(t) for t in ([1, 2, 3, 4], [1, 2, 5], [7, 7, 7], [8], [1, 2])]
    assert prefix_tree(tokens) == [
        Segment(0, 1, (3,), -1),
        Segment(0, 3, (2,), -1),
        Segment(0, 2, (0, 1, 4), -1),
        Segment(2, 3, (1,), 2),
        Segment(2, 4, (0,), 2),
    ]
    assert prefix_tree(tokens, shortest=3) == [
        Segment(0, 1, (3,), -1),
        Segment(0, 3, (2,), -1),
        Segment(0, 2, (4,), -1),
        Segment(0, 3, (1,), -1),
        Segment(0, 4, (0,), -1),
    ]


def test_rows_with_other_experts_are_other_rows():
    tokens = [np.array([4, 5, 6]), np.array([4, 5, 6]), np.array([4, 5])]
    experts = [np.zeros((3, 2, 1), np.int16), np.zeros((3, 2, 1), np.int16), None]
    experts[1][1, 1] = 3
    rows = token_rows(tokens, experts)
    assert [segment.length for segment in prefix_tree(rows[:2])] == [1, 2, 2]
    assert len(prefix_tree(rows[1:])) == 2
    assert token_rows(tokens, [None] * 3) == tokens


@settings(deadline=None)
@given(sequences, st.randoms(use_true_random=False))
def test_runs_of_a_group_count_the_tokens_of_each_part_of_it(tokens, random):
    runs = shared_runs(tokens)
    assert all(one.end == other.start for of_one in runs for one, other in pairwise(of_one))
    work = Work([len(sequence) for sequence in tokens], runs, hidden_size=7)
    part = random.sample(range(len(tokens)), random.randint(1, len(tokens)))
    tree = prefix_tree([tokens[number] for number in part])
    assert work.tokens(part) == sum(segment.length for segment in tree)
    assert work.cost(part) == sum(
        sequence_cost(segment.end, 7) - sequence_cost(segment.start, 7) for segment in tree
    )


def of_group(prompt: int, answers: list[int], name: int) -> tuple[list[int], list[tuple[Run, ...]]]:
    return [prompt + n for n in answers], [(Run(name, 0, prompt),)] * len(answers)


def micro_batches_of(plan) -> list[list[list[int]]]:
    return [
        [
            sorted(held[place] for place in batch)
            for minibatch in plan.minibatches
            for batch in minibatch[rank]
        ]
        for rank, held in enumerate(plan.ranks)
    ]


def test_a_group_is_one_micro_batch_where_it_fits():
    lengths, runs = of_group(60, [10] * 4, 1)
    plan = plan_batch(lengths, 1, 1, 100, 64, runs=runs)
    assert micro_batches_of(plan) == [[[0, 1, 2, 3]]]
    assert (plan.num_tokens, plan.packing_metrics()["packing/fill"]) == (100, 1.0)
    assert len(plan_batch(lengths, 1, 1, 100, 64).minibatches[0][0]) == 4


def test_a_group_is_cut_where_it_exceeds_the_budget():
    lengths, runs = of_group(60, [10] * 6, 1)
    plan = plan_batch(lengths, 1, 1, 100, 64, runs=runs)
    assert sorted(map(len, micro_batches_of(plan)[0])) == [2, 4]
    assert plan.num_tokens == 2 * 60 + 60


def test_groups_stay_whole_on_ranks_and_one_group_is_divided():
    prompts = [of_group(60, [10] * 4, name) for name in range(4)]
    lengths, runs = ([x for part in parts for x in part] for parts in zip(*prompts, strict=True))
    whole = micro_batches_of(plan_batch(lengths, 2, 1, 100, 64, runs=runs))
    assert sorted(batch for rank in whole for batch in rank) == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]
    ]  # fmt: skip
    assert [len(rank) for rank in whole] == [2, 2]
    divided = micro_batches_of(plan_batch(lengths[:4], 4, 1, 100, 64, runs=runs[:4]))
    assert sorted(rank[0] for rank in divided) == [[0], [1], [2], [3]]


answers = st.lists(st.integers(1, 40), min_size=4, max_size=4)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), answers), min_size=4, max_size=6),
    st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 3), (4, 1)]),
)
def test_plans_of_groups_hold_each_sequence_once_within_the_budget(groups, counts):
    num_ranks, fewest = counts
    parts = [of_group(prompt, of_prompt, name) for name, (prompt, of_prompt) in enumerate(groups)]
    lengths, runs = ([x for part in each for x in part] for each in zip(*parts, strict=True))
    plan = plan_batch(lengths, num_ranks, 1, 100, 64, fewest, runs=runs)
    work = Work(lengths, runs, 64)
    batches = micro_batches_of(plan)
    held = [number for rank in batches for batch in rank for number in batch]
    assert sorted(held) == list(range(len(lengths)))
    assert len({len(rank) for rank in batches}) == 1
    assert len(batches[0]) >= fewest
    assert all(0 < work.tokens(batch) <= 100 for rank in batches for batch in rank)
    assert plan.num_tokens == sum(work.tokens(batch) for rank in batches for batch in rank)


def test_where_a_rank_would_have_too_few_sequences_all_have_equally_many():
    """By cost one rank would have a sequence of 100 tokens, and the other one two micro-batches."""
    lengths, runs = [100, 60, 60, 5], [(), (), (), ()]
    parts = [of_group(50, [2] * 4, 1), of_group(2, [90, 90, 4, 4], 2)]
    for num_ranks in (2, 4):
        for more_lengths, more_runs in parts:
            plan = plan_batch(lengths + more_lengths, num_ranks, 1, 100, 64, runs=runs + more_runs)
            assert sorted(n for rank in micro_batches_of(plan) for batch in rank for n in batch) == [
                *range(8)
            ]


@pytest.mark.parametrize("num_units", [1, 2])
def test_pairs_that_share_a_prompt_stay_together(num_units):
    lengths, runs = of_group(40, [10] * 2 * num_units, 5)
    units = [number // 2 for number in range(2 * num_units)]
    plan = plan_batch(lengths, 1, 1, 60, 64, units=units, runs=runs)
    assert sorted(micro_batches_of(plan)[0]) == [[0, 1], [2, 3]][:num_units]
