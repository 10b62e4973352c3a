"""Metrics of a validation against values worked out by hand, by enumeration or by a second formula."""

import random
from itertools import combinations
from statistics import fmean, stdev

import pytest

from nemorl.config.algorithm import ValidationConfig
from nemorl.rollout.groups import TrajectorySummary
from nemorl.run.validation import (
    Interval,
    cons_at_k,
    normal_interval,
    pass_at_k,
    validation_metrics,
    wilson_interval,
    with_intervals,
)
from tests.algorithms.groups import group, trajectory


@pytest.mark.parametrize(("samples", "passed"), [(4, 0), (4, 1), (5, 2), (6, 5), (3, 3)])
def test_pass_at_k_is_the_chance_over_all_subsets(samples: int, passed: int) -> None:
    outcomes = [i < passed for i in range(samples)]
    for k in range(1, samples + 1):
        expected = fmean(any(chosen) for chosen in combinations(outcomes, k))
        assert pass_at_k(samples, passed, k) == pytest.approx(expected)


def test_more_than_the_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@5 requires at least 5 samples"):
        pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="cons@3 requires at least 3 samples"):
        cons_at_k(said("1", "2"), [True, False], 3)


def said(*answers: str | None, right: str = "42") -> list[TrajectorySummary]:
    return [trajectory(float(a == right), row, answer=a) for row, a in enumerate(answers)]


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        (("42", "7", "42"), 3, 1.0),
        (("7", "42", "7", "42", "42"), 3, 0.0),  # the first three only
        (("7", "42"), 2, 0.5),  # equally many votes
        (("7", None, None, "42", "42"), 5, 1.0),  # silence does not vote
        ((None, None), 2, 0.0),
        (("42", "7", "8", "9"), 4, 0.25),
    ],
)
def test_cons_at_k(answers: tuple[str | None, ...], k: int, expected: float) -> None:
    samples = said(*answers)
    assert cons_at_k(samples, [t.reward >= 1 for t in samples], k) == expected


def test_wilson_of_single_samples() -> None:
    """8 of 10: 0.4902 to 0.9433; none of 20: 0 to 0.1611 (Newcombe 1998, table I, method 3, for 0/20)."""
    some = wilson_interval([1.0] * 8 + [0.0] * 2)
    assert (some.low, some.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    none = wilson_interval([0.0] * 20)
    assert (none.low, none.high) == (0.0, pytest.approx(0.1611, abs=1e-4))
    every = wilson_interval([1.0] * 20)
    assert (every.low, every.high) == (pytest.approx(1 - none.high), 1.0)


def test_wilson_counts_tasks_and_not_their_samples() -> None:
    """Samples that are all equal in a task say no more than one; what varies within tasks says more."""
    one_each = wilson_interval([1.0] * 5 + [0.0] * 5)
    assert wilson_interval([0.5] * 4 + [0.75, 0.25] * 3).high < one_each.high
    assert wilson_interval([1.0] * 10 + [0.0] * 10).high < one_each.high


@pytest.mark.parametrize("samples", [1, 4])
def test_wilson_covers_the_truth_in_about_95_of_100(samples: int) -> None:
    """Tasks of differing difficulty, 0.7 right in the mean."""
    draw = random.Random(5)
    hits = 0
    for _ in range(400):
        shares = []
        for _ in range(40):
            chance = draw.choice((0.4, 1.0))
            shares.append(fmean(draw.random() < chance for _ in range(samples)))
        found = wilson_interval(shares)
        hits += found.low <= 0.7 <= found.high
    assert 0.92 <= hits / 400 <= 0.98


def test_normal_interval() -> None:
    values = [0.2, -1.0, 3.0, 0.7]
    half = 1.959964 * stdev(values) / len(values) ** 0.5
    found = normal_interval(values)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((fmean(values) - half, fmean(values) + half))
    assert normal_interval([1.0]) is None


def test_validation_metrics() -> None:
    groups = [
        group(0, *said("42", "42", "7")),
        group(1, *said("7", "7", "42")),
    ]
    config = ValidationConfig(num_generations_per_prompt=3, pass_at_k=(1, 3), cons_at_k=(1, 3))
    metrics = validation_metrics(groups, config)
    assert (
        metrics["validation/accuracy"] == metrics["validation/pass@1"] == metrics["validation/reward"] == 0.5
    )
    assert metrics["validation/pass@3"] == 1.0
    assert metrics["validation/cons@1"] == metrics["validation/cons@3"] == 0.5
    assert metrics["validation/accuracy_low"] < 0.5 < metrics["validation/accuracy_high"] <= 1
    assert metrics["validation/pass@3_high"] == 1.0 > metrics["validation/pass@3_low"] > 0

    of_set = validation_metrics(groups, config, "validation/hard")
    assert of_set.keys() == {name.replace("validation", "validation/hard") for name in metrics}
    shown = {name: interval for name, _, interval in with_intervals(metrics)}
    assert shown["validation/accuracy"] == Interval(
        metrics["validation/accuracy_low"], metrics["validation/accuracy_high"]
    )
    assert shown["validation/length"] is None
    assert not any(name.endswith(("_low", "_high")) for name in shown)
