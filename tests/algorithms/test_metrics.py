"""Metrics of sampling against values worked out by hand or by enumeration."""

import math
from dataclasses import replace

import pytest

from nemorl.algorithms.metrics import (
    Sources,
    dropped_metrics,
    environment_share,
    rollout_metrics,
    rows_of,
)
from nemorl.config.algorithm import OnlineConfig, ValidationConfig
from nemorl.config.environment import FunctionRewardConfig, ModelRewardConfig, SingleTurnEnvConfig
from nemorl.config.facts import metric_names as known_figures
from nemorl.data.trained import Trained
from nemorl.rewards.scored import ScoringMetrics
from nemorl.rollout.groups import Branch, Dropped
from nemorl.run.validation import validation_metrics
from nemorl.trajectories import StopReason
from tests.algorithms.groups import failed, group, score, trajectory


def test_rollout_metrics() -> None:
    groups = [
        group(0, trajectory(1.0), trajectory(0.0, 1, sampled=5, stop=StopReason.LENGTH)),
        group(1, trajectory(0.5), trajectory(0.5, 1, rewards={})),
    ]
    metrics = rollout_metrics(groups, 0)
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/std"] == pytest.approx((2 * 0.25 / 4) ** 0.5)
    assert metrics["reward/exact"] == pytest.approx(1.5 / 3)  # where it does not apply it does not count
    assert metrics["group/zero_variance"] == 0.5
    assert metrics["stop/length"] == 0.25
    assert metrics["tokens/generated"] == 14
    assert environment_share(groups) == 0.25


def test_rows_of_the_index_have_the_means_over_trained_tokens_of_all_branches() -> None:
    branches = (Branch(0, 5, 2), Branch(1, 9, 6))
    one = group(3, replace(trajectory(1.0, 1), branches=branches), trajectory(0.0, 2), failed(3))
    trained = {
        (one.reference, 0): Trained(0.5, 0.1, 2),
        (one.reference, 1): Trained(1.5, 0.5, 6),
        (one.reference, 2): Trained(math.nan, math.nan, 0),  # by a filter
    }
    first, second, third = rows_of(4, [one], "training", trained=trained, stored=[3])
    assert (first.step, first.group, first.sample, first.stored, first.trains) == (4, 3, 0, True, True)
    assert first.advantage == pytest.approx((2 * 0.5 + 6 * 1.5) / 8)
    assert first.logprob_gap == pytest.approx((2 * 0.1 + 6 * 0.5) / 8)
    assert not second.trains
    assert math.isnan(second.advantage)
    assert (third.trains, third.failed) == (False, True)
    unknown = list(rows_of(4, [one], "training"))
    assert [row.trains for row in unknown] == [True, True, False]
    assert [row.stored for row in unknown] == [False] * 3
    assert not any(row.trains for row in rows_of(4, [one], "validation", "easy"))


def test_the_samples_of_each_source_are_counted() -> None:
    sources = Sources(("few", "none", "many"), (2, 1, 10), pass_reward=1.0)
    groups = [group(1, trajectory(1.0), trajectory(0.5, 1)), group(4, trajectory(0.25), failed(1))]
    assert sources.metrics(groups) == {
        "source/few/share": pytest.approx(2 / 3),
        "source/few/reward": 0.75,
        "source/few/pass_rate": 0.5,
        "source/none/share": 0.0,
        "source/many/share": pytest.approx(1 / 3),
        "source/many/reward": 0.25,
        "source/many/pass_rate": 0.0,
    }
    assert set(sources.metrics([group(0, failed(0))]).values()) == {0.0}


def test_each_reward_has_its_spread_and_how_its_scoring_went() -> None:
    first = group(0, trajectory(1.0), trajectory(0.0, 1), trajectory(0.0, 2, rewards={"kind": 3.0}))
    second = group(1, trajectory(0.5), failed(1))
    groups = [
        replace(
            first, scoring={"exact": ScoringMetrics(0, 2.0, 0.5, None), "judge": ScoringMetrics(0, 1.0, 0, 3)}
        ),
        replace(
            second,
            scoring={"exact": ScoringMetrics(1, 4.0, 1.5, None), "judge": ScoringMetrics(0, 5.0, 0, 1)},
        ),
    ]
    metrics = rollout_metrics(groups, 0)
    assert metrics["reward_std/exact"] == pytest.approx(((0.5**2 + 0.5**2 + 0) / 3) ** 0.5)
    assert metrics["reward_absent/exact"] == pytest.approx(1 / 4)
    assert metrics["reward_absent/kind"] == pytest.approx(3 / 4)
    assert metrics["reward_absent/judge"] == 1
    assert metrics["reward_errors/exact"] == 1
    assert (metrics["reward_seconds/exact"], metrics["reward_waiting/exact"]) == (3.0, 1.0)
    assert metrics["reward_retries/judge"] == 4
    assert "reward_retries/exact" not in metrics
    assert "reward_std/judge" not in metrics
    rewards = (
        FunctionRewardConfig(function="own:exact"),
        FunctionRewardConfig(function="own:kind"),
        ModelRewardConfig(kind="model", name="judge", url="http://judge/v1", model="m"),
    )
    config = OnlineConfig(name="grpo", num_steps=1, num_prompts_per_step=1, num_generations_per_prompt=3)
    assert metrics.keys() <= known_figures(config, SingleTurnEnvConfig(), rewards)


def test_every_metric_can_be_named_in_a_config() -> None:
    config = OnlineConfig(
        name="grpo", num_steps=1, num_prompts_per_step=1, num_generations_per_prompt=3,
        validation=ValidationConfig(period=1, num_generations_per_prompt=2, pass_at_k=(1, 2), cons_at_k=(2,)),
    )  # fmt: skip
    groups = [group(0, *(trajectory(1.0, row, stop=stop) for row, stop in enumerate(StopReason)))]
    written = rollout_metrics(groups, 0).keys() | validation_metrics(groups * 2, config.validation).keys()
    assert written <= known_figures(
        config, SingleTurnEnvConfig(), (FunctionRewardConfig(function="own:exact"),)
    )


def test_failed_trajectories_are_no_rewards() -> None:
    lost = trajectory(0.0, 1, error="the environment hung")
    metrics = rollout_metrics([group(0, trajectory(1.0), lost), group(1, trajectory(0.5), lost)], 0)
    assert metrics["reward/mean"] == 0.75
    assert metrics["errors"] == 2
    assert metrics["group/zero_variance"] == 1


def test_a_failed_trajectory_neither_trains_nor_enters_its_baseline() -> None:
    config = OnlineConfig(name="grpo", num_steps=1, num_prompts_per_step=1, num_generations_per_prompt=3)
    failed = trajectory(0.0, 1, sampled=0, error="the environment hung")
    places = score(config, [group(7, trajectory(1.0), failed, trajectory(0.0, 2))])
    assert [p.row for p in places] == [0, 1, 2]
    assert [p.weight for p in places] == pytest.approx([1 / 6, 0, 1 / 6])
    assert [p.advantage for p in places] == pytest.approx([0.5**0.5, 0, -(0.5**0.5)], rel=1e-4)


def test_weights_are_counted_in_each_minibatch_alone() -> None:
    config = OnlineConfig(
        name="grpo", num_steps=1, num_prompts_per_step=2, num_generations_per_prompt=2, num_minibatches=2
    )
    groups = [
        group(0, trajectory(1, sampled=1), trajectory(0, 1, sampled=3)),
        group(1, trajectory(1, sampled=2), trajectory(0, 1, sampled=8)),
    ]
    assert [p.weight for p in score(config, groups)] == pytest.approx([1 / 4, 1 / 4, 1 / 10, 1 / 10])


def test_the_lag_is_of_the_oldest_token_and_the_spread_within_a_trajectory() -> None:
    versions = ((4, 4), (2, 5), (3, 3), (-1, -1))  # the last has no token
    members = [
        replace(trajectory(1.0, row), min_version=oldest, max_version=newest)
        for row, (oldest, newest) in enumerate(versions)
    ]
    metrics = rollout_metrics([group(0, *members)], version=5)
    assert metrics["version/lag"] == pytest.approx((1 + 3 + 2) / 3)
    assert metrics["version/lag_max"] == 3
    assert metrics["version/spread"] == pytest.approx((0 + 3 + 0) / 3)


def test_dropped_groups_are_counted_by_reason_length_and_reward() -> None:
    dropped = [
        Dropped(0, "too_old", (16, 14), (1.0, 0.0)),
        Dropped(3, "aborted", (2, 8)),
        Dropped(4, "cut_off", (20,), (1.0,)),
    ]
    late = trajectory(0.0, 4, sampled=30, error="not finished", trains=False, stop=StopReason.DEADLINE)
    lengths = enumerate((4, 8, 8, 12))
    trained = group(1, *(trajectory(row % 2, row, sampled=length) for row, length in lengths), late)
    metrics = dropped_metrics(dropped, 1, [trained])
    # Lengths 2 | 8 is that of the second and third quarter | 14, 16, 20 and 30 are longer than all.
    assert metrics == {
        "dropped/too_old": 1, "dropped/aborted": 1, "dropped/cut_off": 1, "dropped/deadline": 0,
        "dropped/lost": 0, "dropped/failed": 0, "dropped/discarded": 0, "dropped/given_up": 1,
        "dropped/late": 1, "dropped/tokens": 90, "dropped/length": 15,
        "dropped/length_ratio": pytest.approx(15 / 8),
        "dropped/reward": pytest.approx(2 / 3), "dropped/reward_gap": pytest.approx(2 / 3 - 1 / 2),
        "dropped/share_q1": pytest.approx(1 / 6), "dropped/share_q2": pytest.approx(1 / 12),
        "dropped/share_q3": pytest.approx(1 / 12), "dropped/share_q4": pytest.approx(4 / 6),
    }  # fmt: skip
    nothing = dropped_metrics([], 0, [group(1, trajectory(1.0))])
    assert set(nothing.values()) == {0}
    counts = {"num_steps": 1, "num_prompts_per_step": 4, "num_generations_per_prompt": 2}
    assert metrics.keys() <= OnlineConfig.model_validate({"name": "grpo", **counts}).metrics


def test_equal_lengths_show_no_bias() -> None:
    """Also where limits cut many answers to the same length, or all are that long."""
    for lengths in ([5] * 8, [1, 2, 3, 4, 9, 9, 9, 9]):
        members = [trajectory(row % 2, row, sampled=length) for row, length in enumerate(lengths)]
        metrics = dropped_metrics([Dropped(0, "lost", tuple(lengths))], 0, [group(1, *members)])
        assert [metrics[f"dropped/share_q{quarter}"] for quarter in range(1, 5)] == pytest.approx([0.25] * 4)
        assert metrics["dropped/length_ratio"] == 1
