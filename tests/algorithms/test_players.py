"""Groups whose samples have a trajectory for each player: nothing compares a player with its opponents."""

from typing import Any

import pytest

from nemorl.algorithms.best_of_n import best_of, pairs_of
from nemorl.algorithms.filters import filter_groups
from nemorl.algorithms.metrics import rollout_metrics
from nemorl.algorithms.policy_gradient import clipped
from nemorl.config.algorithm import OnlineConfig
from nemorl.config.algorithm.online import AdvantageClipConfig, FiltersConfig
from nemorl.rollout.groups import GroupSummary
from tests.algorithms.groups import failed, group, score, trajectory


def game(number: int, white: list[float], black: list[float]) -> GroupSummary:
    """A group of games, each with a trajectory of white and of black."""
    pairs = [("white", w, "black", b) for w, b in zip(white, black, strict=True)]
    players = [(name, reward) for a, w, b, x in pairs for name, reward in ((a, w), (b, x))]
    return group(number, *(trajectory(r, row, player=name) for row, (name, r) in enumerate(players)))


def config(**fields: Any) -> OnlineConfig:
    counts = {"name": "grpo", "num_steps": 9, "num_prompts_per_step": 2, "num_generations_per_prompt": 3}
    return OnlineConfig.model_validate({**counts, **fields})


# White wins two games of three in the first group; in the second one black wins all.
GAMES = [game(0, [1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]), game(1, [-1.0] * 3, [1.0] * 3)]


def advantages(of_config: OnlineConfig, groups: list[GroupSummary]) -> dict[tuple[str, int], Any]:
    return {
        (place.store, place.row): place.advantage for place in score(of_config, groups) if place.weight > 0
    }


def test_a_player_is_compared_with_itself_in_other_samples() -> None:
    found = advantages(config(advantage={"name": "group", "normalize": False}), GAMES)
    # The mean of white is 1/3, that of black -1/3; with one baseline for both it would be 0.
    expected = [2 / 3, -2 / 3, 2 / 3, -2 / 3, -4 / 3, 4 / 3]
    assert [found["store-0", row] for row in range(6)] == pytest.approx(expected)
    assert [found["store-1", row] for row in range(6)] == [0.0] * 6


def test_a_baseline_over_the_batch_is_of_one_player() -> None:
    found = advantages(config(advantage={"name": "reinforce", "normalization": "mean"}), GAMES)
    # Over both groups the mean of white is -1/3, that of black 1/3.
    assert [found["store-0", row] for row in (0, 1)] == pytest.approx([4 / 3, -4 / 3])
    assert [found["store-1", row] for row in (0, 1)] == pytest.approx([-2 / 3, 2 / 3])


def test_tokens_of_a_player_are_compared_with_its_own_in_other_samples() -> None:
    places = score(config(name="otb"), GAMES)
    assert [place.group for place in places] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert {place.group for place in score(config(name="ppo", critic={}), GAMES)} == {None}


def test_advantages_are_clipped_after_all_else() -> None:
    unclipped = {"name": "group", "normalize": False}
    found = advantages(config(advantage=unclipped, advantage_clip={"low": -1.0, "high": 0.5}), GAMES)
    assert [found["store-0", row] for row in range(6)] == pytest.approx([0.5, -2 / 3, 0.5, -2 / 3, -1.0, 0.5])
    one_bound = advantages(config(advantage=unclipped, advantage_clip={"high": 1.0}), GAMES)
    assert [one_bound["store-0", row] for row in range(4, 6)] == pytest.approx([-4 / 3, 1.0])
    assert clipped((3.0, -0.5, -3.0), AdvantageClipConfig(low=-1.0, high=2.0)) == (2.0, -0.5, -1.0)


def test_a_group_without_a_difference_within_any_player_is_dropped() -> None:
    kept = filter_groups(GAMES, FiltersConfig(drop_equal_rewards=True), 2)
    trained = {one.group: any(t.trains for t in one.trajectories) for one in kept.groups}
    assert trained == {0: True, 1: False}


def test_the_most_varied_group_is_that_of_the_most_varied_player() -> None:
    varied = game(2, [0.0, 0.5, 1.0], [3.0, 3.0, 3.0])  # white deviates by 0.5, both together by 1.3
    kept = filter_groups([varied, GAMES[0]], FiltersConfig(keep_most_varied=0.5), 2)
    assert [one.group for one in kept.groups if any(t.trains for t in one.trajectories)] == [0]


def test_metrics_name_the_players() -> None:
    metrics = rollout_metrics(GAMES, 2)
    assert metrics["players/white/reward"] == pytest.approx((1 + 1 - 1 - 3) / 6)
    assert metrics["players/black/reward"] == pytest.approx((-1 - 1 + 1 + 3) / 6)
    # Of the four groups of players, those of the second game have equal rewards.
    assert metrics["group/zero_variance"] == 0.5


def test_the_best_of_each_player_train() -> None:
    assert [one.chosen.row for one in best_of(GAMES[:1])] == [0, 5]
    assert [(one.chosen.row, one.rejected.row) for one in pairs_of(GAMES) if one.rejected] == [(0, 4), (5, 1)]


def test_an_episode_that_failed_before_its_first_call_makes_uneven_minibatches() -> None:
    members = [*GAMES[0].trajectories[:4], failed(4)]
    uneven = [group(0, *members), GAMES[1]]
    assert uneven[0].num_samples == 3
    places = score(config(num_minibatches=2), uneven)
    # Eleven trajectories in two parts, of which the shorter one is filled up; ten of them train.
    assert len(places) == 12
    assert sum(place.weight > 0 for place in places) == 10
