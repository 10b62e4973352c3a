"""Advantages of groups against their papers' formulas, written out in plain Python floats."""

import math
from dataclasses import replace
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from nemorl.algorithms.advantages import estimator
from nemorl.algorithms.custom import CustomFunctionError, advantage, smoke_test_advantage
from nemorl.config.algorithm.advantages import CustomAdvantageConfig, OfGroupsConfig
from nemorl.rollout.groups import GroupSummary
from tests.algorithms.groups import failed, group, paid, trajectory

# Ragged, of one, of equal rewards, and rewards far from 0: (rewards, sampled tokens) of each group.
BATCH = [
    ([1.0, 0.0, 0.5, 0.25], [3, 9, 4, 1]),
    ([2.0, 2.0], [5, 7]),
    ([7.0], [2]),
    ([-100.3, -100.1, -99.0], [8, 1, 1]),
    ([0.0, 1.0, 1.0, 0.0, 0.0], [2, 2, 3, 10, 6]),
]
GROUPS = [paid(number, *part) for number, part in enumerate(BATCH)]
WEIGHTS = {"exact": 1.0, "format": 0.25, "length": -2.0}


def estimate(groups: list[GroupSummary], **config: Any) -> list[list[Any]]:
    parsed: OfGroupsConfig = TypeAdapter(OfGroupsConfig).validate_python(config)
    return [list(row) for row in estimator(parsed, WEIGHTS)(groups)]


def assert_equal(found: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(row) for row in found] == [len(row) for row in expected]
    flat = [value for row in expected for value in row]
    assert [value for row in found for value in row] == pytest.approx(flat, rel=1e-9, abs=1e-9)


def mean_and_deviation(values: list[float], counts: list[int]) -> tuple[float, float]:
    """Of values of which each is there several times."""
    every = [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
    return fmean(every), stdev(every)


def test_group_by_the_deviation_of_the_others() -> None:
    """NeMo-RL's: mean and deviation without the sample itself; where that is 0, nothing is divided."""
    expected = []
    for rewards, _ in BATCH:
        row = []
        for i, reward in enumerate(rewards):
            others = [r for j, r in enumerate(rewards) if j != i] or [reward]
            spread = stdev(others) if len(others) > 1 else 0.0
            row.append((reward - fmean(others)) / (spread + 1e-6 if spread else 1))
        expected.append(row)
    found = estimate(GROUPS, name="group", leave_one_out=True, deviation="others")
    assert_equal(found, expected)
    pair = estimate(
        [paid(0, [1.0, 0.0]), paid(1, [1.0, 0.0, 0.0])], name="group", leave_one_out=True, deviation="others"
    )
    assert pair == [[1.0, -1.0], pytest.approx([1.0, -0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)])]


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_group(normalize: bool, leave_one_out: bool) -> None:
    expected = []
    for rewards, _ in BATCH:
        row = []
        for i, reward in enumerate(rewards):
            if len(set(rewards)) == 1:
                row.append(0.0)
                continue
            others = [r for j, r in enumerate(rewards) if j != i or not leave_one_out]
            row.append((reward - fmean(others)) / ((stdev(rewards) + 1e-4) if normalize else 1))
        expected.append(row)
    config = {"name": "group", "normalize": normalize, "leave_one_out": leave_one_out, "epsilon": 1e-4}
    assert_equal(estimate(GROUPS, **config), expected)


@pytest.mark.parametrize("over", ["tokens", "trajectories"])
@pytest.mark.parametrize("normalization", ["none", "mean", "whiten"])
def test_reinforce(normalization: str, over: str) -> None:
    rewards = [r for part, _ in BATCH for r in part]
    counts = [n if over == "tokens" else 1 for _, lengths in BATCH for n in lengths]
    mean, deviation = mean_and_deviation(rewards, counts)
    shift, scale = {"none": (0.0, 1.0), "mean": (mean, 1.0), "whiten": (mean, deviation + 1e-3)}[
        normalization
    ]
    expected = [[(r - shift) / scale for r in part] for part, _ in BATCH]
    config = {"name": "reinforce", "normalization": normalization, "over": over, "epsilon": 1e-3}
    assert_equal(estimate(GROUPS, **config), expected)


@pytest.mark.parametrize("over", ["tokens", "trajectories"])
def test_group_then_batch(over: str) -> None:
    centred = [[r - fmean(part) for r in part] for part, _ in BATCH]
    counts = [n if over == "tokens" else 1 for _, lengths in BATCH for n in lengths]
    mean, deviation = mean_and_deviation([c for row in centred for c in row], counts)
    expected = [[(c - mean) / (deviation + 1e-8) for c in row] for row in centred]
    assert_equal(estimate(GROUPS, name="group_then_batch", over=over), expected)


@pytest.mark.parametrize("lengths", [[0, 1], [0, 0]])
def test_over_hardly_any_tokens_advantages_are_numbers(lengths: list[int]) -> None:
    groups = [paid(0, [0.0, 1.0], lengths)]
    for config in (
        {"name": "reinforce", "normalization": "mean", "over": "tokens"},
        {"name": "reinforce", "over": "tokens"},
        {"name": "group_then_batch"},
    ):
        assert all(map(math.isfinite, estimate(groups, **config)[0])), config


def test_one_token_is_its_own_mean() -> None:
    config = {"name": "reinforce", "normalization": "mean", "over": "tokens"}
    assert estimate([paid(0, [0.0, 1.0], [0, 1])], **config) == [[-1.0, 0.0]]


def test_two_trajectories_are_whitened_by_their_unbiased_deviation() -> None:
    (found,) = estimate([paid(0, [0.0, 1.0])], name="reinforce", normalization="whiten")
    assert found == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


@pytest.mark.parametrize("name", ["reinforce", "group_then_batch"])
def test_the_biased_variance_divides_by_the_number(name: str) -> None:
    (found,) = estimate([paid(0, [0.0, 1.0], [3, 1])], name=name, over="trajectories", variance="biased")
    assert found == pytest.approx([-1.0, 1.0])


def test_remax() -> None:
    groups = [
        group(0, trajectory(1.0), trajectory(0.25, 1), greedy=0.5),
        group(1, trajectory(1.0), greedy=0.0),
        group(2, trajectory(1.0), trajectory(1.0, 1), greedy=1.0),
    ]
    assert estimate(groups, name="remax") == [[0.5, -0.25], [1.0], [0.0, 0.0]]


def test_remax_without_its_baseline_teaches_nothing() -> None:
    broken = replace(group(0, trajectory(1.0)), greedy=failed(1))
    assert estimate([broken], name="remax") == [[0.0]]


def test_optimal_baseline_has_the_least_variance() -> None:
    found = estimate(GROUPS, name="opo")
    expected = []
    for rewards, lengths in BATCH:
        baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
        expected.append([r - baseline for r in rewards])
    assert_equal(found, expected)

    # Of all numbers b, the one found has the least sum of l (r - b)^2, the variance of the gradient.
    rewards, lengths = BATCH[0]
    chosen = rewards[0] - found[0][0]

    def variance(b: float) -> float:
        return sum(n * (r - b) ** 2 for n, r in zip(lengths, rewards, strict=True))

    assert all(variance(chosen) < variance(chosen + step) for step in (-0.01, 0.01))


def test_optimal_baseline_of_nothing_to_compare_is_the_reward() -> None:
    """Equal rewards, whose mean is not exact, and trajectories without sampled tokens."""
    assert (3 * 0.1 + 7 * 0.1 + 9 * 0.1) / 19 != 0.1  # newer Pythons sum without this error
    groups = [paid(0, [0.1, 0.1, 0.1], [3, 7, 9]), paid(1, [0.0, 1.0], [0, 0])]
    assert estimate(groups, name="opo") == [[0.0, 0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("normalize", [False, True])
def test_gpg_makes_up_for_groups_without_a_gradient(normalize: bool) -> None:
    alpha = 5 / (5 - 2)  # of five groups one has equal rewards and one is alone
    expected = [
        [alpha * (r - fmean(part)) / ((stdev(part) + 1e-6) if normalize else 1) for r in part]
        if len(set(part)) > 1
        else [0.0] * len(part)
        for part, _ in BATCH
    ]
    assert_equal(estimate(GROUPS, name="gpg", normalize=normalize), expected)


def test_gpg_gives_a_single_teaching_group_the_weight_of_all() -> None:
    groups = [paid(0, [1.0, 0.0]), paid(1, [1.0, 1.0]), paid(2, [0.0])]
    assert estimate(groups, name="gpg", normalize=False) == [[1.5, -1.5], [0.0, 0.0], [0.0]]


def test_gpg_of_a_batch_that_teaches_nothing() -> None:
    assert estimate([paid(0, [1.0, 1.0]), paid(1, [0.0])], name="gpg") == [[0.0, 0.0], [0.0]]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_mean_over_all_sets(k: int) -> None:
    """Each set of k is rewarded as one; its members share GRPO's advantage of the set (biased deviation)."""
    passed = [True, False, False, True, False]
    sets = list(combinations(range(5), k))
    rewards = [float(any(passed[i] for i in members)) for members in sets]
    deviation = math.sqrt(fmean((r - fmean(rewards)) ** 2 for r in rewards))
    expected = [
        fmean(
            (r - fmean(rewards)) / deviation for r, members in zip(rewards, sets, strict=True) if i in members
        )
        if deviation
        else 0.0
        for i in range(5)
    ]
    groups = [paid(0, [0.5 if ok else 0.1 for ok in passed])]
    assert_equal(estimate(groups, name="pass_at_k", k=k, pass_reward=0.5), [expected])


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0], [1.0]])
def test_pass_at_k_where_sets_do_not_differ(rewards: list[float]) -> None:
    assert estimate([paid(0, rewards)], name="pass_at_k", k=2) == [[0.0] * len(rewards)]


@pytest.mark.parametrize("whiten_batch", [False, True])
def test_gdpo(whiten_batch: bool) -> None:
    rewards = [
        [{"exact": 1.0, "format": 1.0}, {"exact": 0.0, "format": 1.0}, {"exact": 0.0, "format": 0.0}],
        [{"exact": 0.5, "length": 9.0}, {"exact": 0.5, "length": 4.0}, {"exact": 1.5}, {"exact": 0.0}],
        [{"exact": 1.0, "format": 0.0}],
    ]
    sums = []
    for of_group in rewards:
        row = []
        for mine in of_group:
            total = 0.0
            for name, value in mine.items():
                others = [r[name] for r in of_group if name in r]
                if len(set(others)) > 1:
                    total += WEIGHTS[name] * (value - fmean(others)) / (stdev(others) + 1e-6)
            row.append(total)
        sums.append(row)
    flat = [value for row in sums for value in row]
    shift, scale = (fmean(flat), stdev(flat) + 1e-6) if whiten_batch else (0.0, 1.0)
    groups = [
        group(number, *(trajectory(0.0, row, rewards=mine) for row, mine in enumerate(of_group)))
        for number, of_group in enumerate(rewards)
    ]
    found = estimate(groups, name="gdpo", whiten_batch=whiten_batch)
    assert_equal(found, [[(value - shift) / scale for value in row] for row in sums])


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_gdpo_of_other_projects(leave_one_out: bool) -> None:
    """verl whitens over tokens; NeMo-RL may leave the sample out of its baseline, and adds nothing."""
    rewards = [[(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)], [(0.5, 0.25), (0.5, 1.0), (0.0, 0.5)]]
    lengths = [[3, 1, 4], [1, 5, 2]]
    names = ("exact", "format")
    sums = []
    for of_group in rewards:
        row = [0.0] * len(of_group)
        for place, name in enumerate(names):
            values = [mine[place] for mine in of_group]
            for i, value in enumerate(values):
                others = values[:i] + values[i + 1 :] if leave_one_out else values
                deviation = stdev(others)
                scale = deviation + 1e-6 if deviation > 0 else 1.0
                row[i] += WEIGHTS[name] * (value - fmean(others)) / scale
        sums.append(row)
    groups = [
        group(
            number,
            *(
                trajectory(0.0, row, rewards=dict(zip(names, mine, strict=True)), num_sampled=size)
                for row, (mine, size) in enumerate(zip(of_group, sizes, strict=True))
            ),
        )
        for number, (of_group, sizes) in enumerate(zip(rewards, lengths, strict=True))
    ]
    options: dict[str, Any] = {"leave_one_out": True, "deviation": "others"} if leave_one_out else {}
    tokens = [
        value
        for row, sizes in zip(sums, lengths, strict=True)
        for value, size in zip(row, sizes, strict=True)
        for _ in range(size)
    ]
    found = estimate(groups, name="gdpo", over="tokens", batch_epsilon=1e-8, **options)
    shift, scale = fmean(tokens), stdev(tokens) + 1e-8
    assert_equal(found, [[(value - shift) / scale for value in row] for row in sums])
    flat = [value for row in sums for value in row]
    found = estimate(groups, name="gdpo", batch_epsilon=0.0, **options)
    shift, scale = fmean(flat), stdev(flat)
    assert_equal(found, [[(value - shift) / scale for value in row] for row in sums])


def test_gdpo_keeps_apart_what_a_sum_makes_equal() -> None:
    """The paper's example: sums of (0, 1) and of (0, 2) are equal once they are normalized."""

    def best(first: list[float], second: list[float], **config: Any) -> float:
        members = (
            trajectory(a + b, row, rewards={"exact": a, "format": b})
            for row, (a, b) in enumerate(zip(first, second, strict=True))
        )
        ((_, advantage),) = estimate([group(0, *members)], epsilon=1e-12, **config)
        return float(advantage)

    one, both = ([0.0, 1.0], [0.0, 0.0]), ([0.0, 1.0], [0.0, 1.0])
    assert best(*one, name="group") == pytest.approx(best(*both, name="group"))
    assert best(*one, name="gdpo", whiten_batch=False) == pytest.approx(math.sqrt(0.5))
    assert best(*both, name="gdpo", whiten_batch=False) == pytest.approx(
        (1 + WEIGHTS["format"]) * math.sqrt(0.5)
    )


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("discount", "outcome_weight"), [(0.0, 1.0), (0.5, 0.3), (1.0, 0.0)])
def test_turns(discount: float, outcome_weight: float, normalize: bool) -> None:
    # What is rewarded for each turn by the environment, and by functions at the end.
    turns = [([0.5, 0.0, 1.0], 0.0), ([0.2, 1.0], 0.5), ([1.0], 0.0), ([0.0, 0.3, 0.1, 0.0], 2.0)]

    def relative(values: list[float], mine: float) -> float:
        if len(set(values)) < 2:
            return 0.0
        return (mine - fmean(values)) / ((stdev(values) + 1e-6) if normalize else 1)

    def earned(on_the_way: list[float], turn: int) -> float:
        return sum(discount**j * r for j, r in enumerate(on_the_way[turn:]))

    outcomes = [paid_turns[-1] + at_end for paid_turns, at_end in turns]
    expected = []
    for (paid_turns, _), outcome in zip(turns, outcomes, strict=True):
        row = []
        for turn in range(len(paid_turns) - 1):
            same = [earned(other[:-1], turn) for other, _ in turns if len(other) - 1 > turn]
            row.append(
                relative(same, earned(paid_turns[:-1], turn)) + outcome_weight * relative(outcomes, outcome)
            )
        expected.append([*row, relative(outcomes, outcome)])
    members = (
        trajectory(sum(p) + e, row, num_turns=len(p), turn_rewards=tuple(p))
        for row, (p, e) in enumerate(turns)
    )
    config = {"discount": discount, "outcome_weight": outcome_weight, "normalize": normalize}
    (found,) = estimate([group(0, *members)], name="turn", **config)
    assert_equal([list(row) for row in found], expected)


def test_turns_of_conversations_with_one_are_grpo() -> None:
    found = estimate(GROUPS, name="turn")
    assert [[value for (value,) in row] for row in found] == estimate(GROUPS, name="group")


def test_a_conversation_without_turns_has_no_advantage() -> None:
    members = trajectory(1.0), trajectory(0.0, 1, num_turns=0, turn_rewards=())
    (found,) = estimate([group(0, *members)], name="turn", normalize=False)
    assert found == [(0.5,), ()]


EVERY = [
    {"name": "group"}, {"name": "reinforce"}, {"name": "group_then_batch"}, {"name": "remax"},
    {"name": "opo"}, {"name": "gpg"}, {"name": "turn"}, {"name": "gdpo"}, {"name": "pass_at_k", "k": 2},
]  # fmt: skip


def random_groups(seed: int) -> list[GroupSummary]:
    """Groups of one to six trajectories of one to three turns, with a greedy sample next to each."""
    draw = np.random.default_rng(seed)
    groups = []
    for number in range(8):
        members = []
        for row in range(draw.integers(1, 7)):
            on_the_way = draw.integers(0, 3, size=draw.integers(1, 4)) / 2
            reward = float(draw.integers(0, 3)) / 2 + float(on_the_way.sum())
            rewards = {"exact": float(draw.integers(0, 2)), "format": float(draw.integers(0, 2))}
            members.append(
                trajectory(
                    reward, row, int(draw.integers(1, 20)), rewards=rewards,
                    num_turns=len(on_the_way), turn_rewards=tuple(on_the_way.tolist()),
                )
            )  # fmt: skip
        groups.append(group(number, *members, greedy=float(draw.integers(0, 2))))
    return groups


@pytest.mark.parametrize("config", EVERY, ids=lambda config: config["name"])
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_groups_and_of_members_changes_nothing(config: dict[str, Any], seed: int) -> None:
    groups = random_groups(seed)
    found = {
        (g.group, t.row): value
        for g, row in zip(groups, estimate(groups, **config), strict=True)
        for t, value in zip(g.trajectories, row, strict=True)
    }
    draw = np.random.default_rng(seed + 100)
    shuffled = []
    for place in draw.permutation(len(groups)):
        members = groups[place].trajectories
        order = draw.permutation(len(members))
        shuffled.append(replace(groups[place], trajectories=tuple(members[i] for i in order)))
    for g, row in zip(shuffled, estimate(shuffled, **config), strict=True):
        for t, value in zip(g.trajectories, row, strict=True):
            assert value == pytest.approx(found[g.group, t.row], rel=1e-9, abs=1e-12)


# Those that read `reward`, and its differences only.
@pytest.mark.parametrize("config", EVERY[:-2], ids=lambda config: config["name"])
def test_what_all_receive_as_reward_teaches_nothing(config: dict[str, Any]) -> None:
    def shifted(g: GroupSummary) -> GroupSummary:
        members = tuple(replace(t, reward=t.reward + 8.0) for t in g.trajectories)
        assert g.greedy is not None
        return replace(g, trajectories=members, greedy=replace(g.greedy, reward=g.greedy.reward + 8.0))

    groups = random_groups(7)
    before, after = estimate(groups, **config), estimate([shifted(g) for g in groups], **config)
    for row, other in zip(before, after, strict=True):
        for value, moved in zip(row, other, strict=True):
            assert moved == pytest.approx(value, rel=1e-6, abs=1e-9)


def of_my_own(groups, *, scale=1.0):  # type: ignore[no-untyped-def]
    """The reward, scaled; the number of turns decides whether one a turn is given."""
    return [
        [scale * t.reward if t.num_turns == 1 else (scale * t.reward,) * t.num_turns for t in g.trajectories]
        for g in groups
    ]


def names_its_reward(groups):  # type: ignore[no-untyped-def]
    """Reads a reward by its name."""
    return [[t.rewards["exact_match"] for t in g.trajectories] for g in groups]


def forgets_a_group(groups):  # type: ignore[no-untyped-def]
    """One list too few."""
    return of_my_own(groups)[1:]


def forgets_a_member(groups):  # type: ignore[no-untyped-def]
    """One number too few."""
    return [row[1:] for row in of_my_own(groups)]


def forgets_a_turn(groups):  # type: ignore[no-untyped-def]
    """One number for two turns."""
    return [[(0.0,) for _ in g.trajectories] for g in groups]


def divides_by_zero(groups):  # type: ignore[no-untyped-def]
    """Not a number where rewards are equal."""
    return [[t.reward / 0 for t in g.trajectories] for g in groups]


def answers_nan(groups):  # type: ignore[no-untyped-def]
    """Not a number."""
    return [[math.nan for _ in g.trajectories] for g in groups]


def own(function: str, **arguments: object) -> CustomAdvantageConfig:
    return CustomAdvantageConfig(name="custom", function=f"{__name__}:{function}", arguments=arguments)


def test_a_function_of_ones_own() -> None:
    config = own("of_my_own", scale=2.0)
    smoke_test_advantage(config, ["exact_match"])
    assert estimator(config, {})([paid(0, [1.0, 0.5])]) == [[2.0, 1.0]]
    smoke_test_advantage(own("names_its_reward"), ["exact_match"])


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (own("is_not_there"), "has no is_not_there; correct the name"),
        (CustomAdvantageConfig(name="custom", function="no.such:thing"), r"cannot import no\.such: Module"),
        (own("of_my_own", factor=2.0), "with algorithm.advantage.arguments: got an unexpected keyword"),
        (own("forgets_a_group"), "returned 1 values for 2 groups: return a list with a list for each"),
        (own("forgets_a_member"), "returned 1 values for a group of 2: return a number for each"),
        (own("forgets_a_turn"), "returned 1 values for 2 turns"),
        (own("divides_by_zero"), "on two small groups it raised ZeroDivisionError"),
        (own("answers_nan"), "returned nan for a trajectory: return finite numbers"),
    ],
)
def test_a_function_of_ones_own_that_cannot_be_used_is_reported_before_a_run(
    config: CustomAdvantageConfig, told: str
) -> None:
    with pytest.raises(CustomFunctionError, match=told):
        smoke_test_advantage(config, ["exact_match"])


def test_the_decorator_requires_groups() -> None:
    assert advantage(of_my_own) is of_my_own
    with pytest.raises(CustomFunctionError, match="takes no positional argument"):
        advantage(lambda *, groups: [])
