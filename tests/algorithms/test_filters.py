"""What does not train, with scripted groups; and how what does is laid out."""

import asyncio
from dataclasses import replace

import pytest

from nemorl.algorithms.filters import filter_groups, refill, with_truncated_rewards
from nemorl.config.algorithm import OnlineConfig
from nemorl.config.algorithm.online import FiltersConfig, RefillConfig, TruncatedRewardConfig
from nemorl.config.environment import FunctionRewardConfig, SingleTurnEnvConfig
from nemorl.config.facts import metric_names
from nemorl.data.packed import PLACEHOLDER_TOKENS
from nemorl.data.shards import plan_batch
from nemorl.errors import RunError
from nemorl.rollout.collector import Collector
from nemorl.rollout.groups import GroupSummary
from nemorl.rollout.order import TaskOrder
from nemorl.rollout.schedule import CollectorPlan, DataPlace, GroupSchedule
from nemorl.trajectories import StopReason
from tests.algorithms.groups import failed, group, paid, score, trajectory

EQUAL, MIXED, RIGHT = [0.5, 0.5, 0.5], [0.0, 1.0, 0.5], [1.0, 1.0, 0.9]


def trains(groups: list[GroupSummary]) -> dict[int, list[bool]]:
    return {g.group: [t.trains for t in g.trajectories] for g in groups}


def kept(groups: list[GroupSummary], num_groups: int | None = None, **filters: object) -> list[int]:
    """The groups of which something trains."""
    config = FiltersConfig.model_validate(filters)
    batch = filter_groups(groups, config, num_groups or len(groups))
    assert len(batch.groups) == (num_groups or len(groups))
    return [number for number, members in trains(batch.groups).items() if any(members)]


def test_without_filters_all_groups_train_as_they_are() -> None:
    groups = [paid(0, EQUAL), paid(1, MIXED)]
    batch = filter_groups(groups, FiltersConfig(), 2)
    assert (batch.groups, batch.metrics) == (groups, {})


def test_groups_of_equal_rewards_are_dropped() -> None:
    groups = [paid(0, EQUAL), paid(1, MIXED), paid(2, [1.0]), group(3, failed(0), failed(1)), paid(4, RIGHT)]
    assert kept(groups, drop_equal_rewards=True) == [1, 4]


def test_failed_members_do_not_make_a_group_differ() -> None:
    groups = [group(0, trajectory(1.0), failed(1), trajectory(1.0, 2)), paid(1, MIXED)]
    assert kept(groups, drop_equal_rewards=True) == [1]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.5, None, [0, 1, 2]), (None, 0.5, [0, 1]), (0.6, 1.0, [2]), (0.2, 0.4, [])],
)
def test_groups_too_hard_or_too_easy_are_dropped(
    low: float | None, high: float | None, expected: list[int]
) -> None:
    groups = [paid(0, EQUAL), paid(1, MIXED), paid(2, RIGHT), group(3, failed(0))]
    assert kept(groups, min_mean_reward=low, max_mean_reward=high) == expected


def test_another_reward_may_decide() -> None:
    def accuracy(number: int, *values: float | None) -> GroupSummary:
        """All sums differ, by a penalty of length, say."""
        return group(
            number,
            *(
                trajectory(row / 7, row, rewards={} if value is None else {"accuracy": value})
                for row, value in enumerate(values)
            ),
        )

    groups = [accuracy(0, 1.0, 1.0), accuracy(1, 0.0, 1.0), accuracy(2, 1.0, None), accuracy(3, None, None)]
    assert kept(groups, drop_equal_rewards=True) == [0, 1, 2, 3]
    assert kept(groups, drop_equal_rewards=True, reward="accuracy") == [1]
    assert kept(groups, min_mean_reward=0.75, reward="accuracy") == [0, 2]


@pytest.mark.parametrize(("share", "expected"), [(0.1, [3]), (0.5, [1, 3]), (0.75, [1, 3, 0])])
def test_the_most_varied_groups_train(share: float, expected: list[int]) -> None:
    groups = [paid(0, [0.4, 0.5]), paid(1, [0.0, 0.9, 0.4]), paid(2, EQUAL), paid(3, [0.0, 1.0])]
    assert sorted(kept(groups, keep_most_varied=share)) == sorted(expected)


def test_a_group_of_one_does_not_vary() -> None:
    groups = [paid(0, [1.0]), paid(1, [0.4, 0.5]), paid(2, [0.0, 1.0])]
    assert sorted(kept(groups, keep_most_varied=0.7)) == [1, 2]


def test_truncated_trajectories_do_not_train_and_stay_in_their_baseline() -> None:
    cut = trajectory(0.0, 1, sampled=9, stop=StopReason.LENGTH)
    batch = filter_groups([group(0, trajectory(1.0), cut)], FiltersConfig(drop_truncated=True), 1)
    assert trains(batch.groups) == {0: [True, False]}
    assert batch.metrics == {"filters/sampled": 1, "filters/kept": 1, "filters/truncated": 1}
    config = online(1, 2, advantage={"normalize": False})
    places = score(config, batch.groups)
    assert [p.advantage for p in places] == [0.5, 0.0]
    assert [p.weight for p in places] == pytest.approx([1 / 3, 0.0])
    assert [p.num_tokens for p in places] == [7, PLACEHOLDER_TOKENS]


def test_metrics_say_what_was_dropped_and_can_be_named_in_a_config() -> None:
    filters = {
        "drop_equal_rewards": True, "max_mean_reward": 0.9, "keep_most_varied": 0.6, "drop_truncated": True,
        "refill": {},
    }  # fmt: skip
    groups = [
        paid(0, EQUAL),
        paid(1, RIGHT),
        paid(2, MIXED),
        paid(3, MIXED),
        paid(4, [0.0, 0.1]),
        paid(5, EQUAL),
    ]
    batch = filter_groups(groups, FiltersConfig.model_validate(filters), 3)
    assert batch.metrics == {
        "filters/sampled": 6, "filters/kept": 1, "filters/dropped_equal_rewards": 2,
        "filters/dropped_mean_reward": 1, "filters/least_varied": 2, "filters/truncated": 0,
    }  # fmt: skip
    config = online(3, 3, filters=filters)
    rewards = (FunctionRewardConfig(function="f"),)
    assert batch.metrics.keys() <= metric_names(config, SingleTurnEnvConfig(), rewards)


def test_a_step_that_stays_short_of_groups_stops_the_run_where_it_is_configured_to() -> None:
    config = FiltersConfig(drop_equal_rewards=True, max_mean_reward=0.9, refill=RefillConfig(at_cap="stop"))
    groups = [paid(0, MIXED), paid(1, EQUAL), paid(2, EQUAL), paid(3, RIGHT)]
    assert len(filter_groups(groups, config, 1).groups) == 1
    with pytest.raises(
        RunError,
        match=r"1 of 4 groups sampled for one step are left, 2 are required: 2 because their rewards are "
        r"all equal and 1 by their mean reward were dropped\..*max_batches",
    ):
        filter_groups(groups, config, 2)


def online(prompts: int, generations: int, **settings: object) -> OnlineConfig:
    return OnlineConfig.model_validate(
        {
            "name": "grpo", "num_steps": 1, "num_prompts_per_step": prompts,
            "num_generations_per_prompt": generations, **settings,
        }
    )  # fmt: skip


def test_dropped_groups_count_neither_in_advantages_nor_in_denominators() -> None:
    groups = [paid(0, [9.0, 9.0], [50, 50]), paid(1, [0.0, 1.0], [3, 5])]
    batch = filter_groups(groups, FiltersConfig(drop_equal_rewards=True), 2)
    config = online(2, 2, advantage={"name": "reinforce", "normalization": "mean"})
    places = {(p.store, p.row): p for p in score(config, batch.groups)}
    assert [places["store-1", row].advantage for row in (0, 1)] == [-0.5, 0.5]
    assert [places["store-1", row].weight for row in (0, 1)] == pytest.approx([1 / 8, 1 / 8])
    for row in (0, 1):
        place = places["store-0", row]
        assert (place.advantage, place.weight, place.num_tokens) == (0.0, 0.0, PLACEHOLDER_TOKENS)


def test_a_batch_of_which_nothing_is_left_is_made_of_stand_ins() -> None:
    batch = filter_groups([paid(0, EQUAL), paid(1, EQUAL)], FiltersConfig(drop_equal_rewards=True), 2)
    places = score(online(2, 3), batch.groups)
    assert [p.weight for p in places] == [0.0] * 6
    assert {p.num_tokens for p in places} == {PLACEHOLDER_TOKENS}


def test_what_is_left_is_spread_over_minibatches() -> None:
    groups = [paid(0, EQUAL), paid(1, [0.0, 1.0, 2.0], [2, 2, 2]), paid(2, EQUAL), paid(3, EQUAL)]
    batch = filter_groups(groups, FiltersConfig(drop_equal_rewards=True), 4)
    places = score(online(4, 3, num_minibatches=3), batch.groups)
    minibatches = [places[start : start + 4] for start in (0, 4, 8)]
    assert [[p.row for p in part if p.weight > 0] for part in minibatches] == [[0], [1], [2]]
    assert [p.weight for p in places if p.weight > 0] == pytest.approx([0.5] * 3)
    assert len({(p.store, p.row) for p in places}) == 12


def test_each_turn_has_its_own_advantage_in_the_batch() -> None:
    turns = [
        trajectory(1.0, 0, num_turns=2, turn_rewards=(0.5, 0.5)),
        trajectory(0.0, 1, num_turns=2, turn_rewards=(0.0, 0.0)),
    ]
    config = online(1, 2, advantage={"name": "turn", "normalize": False})
    places = score(config, [group(0, *turns)])
    assert [p.advantage for p in places] == [(0.5, 0.25), (-0.5, -0.25)]


class ScriptedWorker:
    """Samples groups whose rewards are a function of the group alone, and keeps what it was asked for."""

    is_up = True

    def __init__(self) -> None:
        self.sampled: list[int] = []

    async def abort_stale(self, oldest: int) -> None:
        """Nothing runs when weights change."""

    async def run_groups(self, assignments):  # type: ignore[no-untyped-def]
        for assignment in reversed(assignments):
            self.sampled.append(assignment.group)
            await asyncio.sleep(0)
            yield replace(paid(assignment.group, script(assignment.group)), task_index=assignment.task_index)


def script(number: int) -> list[float]:
    """Two groups of three have equal rewards."""
    return MIXED if number % 3 == 1 else EQUAL


async def collect(steps: range, position: int, max_batches: int) -> list[tuple[list[int], list[int], int]]:
    """What trains, what was sampled, and the place in the data after each step."""
    config = FiltersConfig(drop_equal_rewards=True, refill=RefillConfig(max_batches=max_batches))
    worker = ScriptedWorker()
    plan = CollectorPlan(groups_per_step=4, samples_per_group=3, max_staleness=0)
    order = TaskOrder(50, seed=0, shuffle=True)
    schedule = GroupSchedule(order, plan, steps.start, DataPlace(position), refill(config, 4))
    sampling = Collector([worker], schedule, 5.0)
    found = []
    for version in steps:
        sampling.advance(version)
        groups = await sampling.next_batch()
        assert [g.task_index for g in groups] == [order.task_index(g.group) for g in groups]
        batch = filter_groups(groups, config, 4)
        left = [g.group for g in batch.groups if g.trajectories[0].trains]
        assert batch.metrics["filters/sampled"] == len(groups)
        found.append((left, sorted(worker.sampled), sampling.place.position))
        worker.sampled.clear()
    await sampling.close()
    return found


@pytest.mark.parametrize("max_batches", [2, 10])
def test_dynamic_sampling_fills_steps_and_a_resumed_run_samples_the_same(max_batches: int) -> None:
    whole = asyncio.run(collect(range(3), 0, max_batches))
    start = 0
    for left, sampled, position in whole:
        # By brute force: groups in the order of the data until four differ or the cap is reached.
        expected: list[int] = []
        number = start
        while len(expected) < 4 and number - start < 4 * max_batches:
            expected += [number] if len(set(script(number))) > 1 else []
            number += 1
        assert (left, sampled, position) == (expected, list(range(start, number)), number)
        start = number
    assert asyncio.run(collect(range(1, 3), whole[0][2], max_batches)) == whole[1:]
    assert len(whole[0][0]) == (4 if max_batches == 10 else 3)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("advantage", [{"name": "group"}, {"name": "group_then_batch"}, {"name": "turn"}])
def test_ranks_hold_the_same_advantages_however_many_they_are(
    advantage: dict[str, object], num_minibatches: int, ranks: int
) -> None:
    groups = [
        paid(0, [0.0, 1.0, 0.5, 0.0], [1, 30, 2, 9]),
        group(
            1, trajectory(0.0), trajectory(1.0, 1, 20), failed(2), trajectory(0.5, 3, stop=StopReason.LENGTH)
        ),
        paid(2, [1.0] * 4),
        paid(3, [0.25, 0.0, 0.0, 0.0], [5, 5, 40, 1]),
    ]
    filters = {"drop_equal_rewards": True, "drop_truncated": True}
    config = online(4, 4, advantage=advantage, filters=filters, num_minibatches=num_minibatches)
    places = score(config, filter_groups(groups, config.filters, 4).groups)

    plan = plan_batch([p.num_tokens for p in places], ranks, num_minibatches, 64, 32)
    held = {
        (shard.stores[store], row): (advantage, weight)
        for shard in plan.shards(places)
        for (store, row), advantage, weight in zip(shard.places, shard.advantages, shard.weights, strict=True)
    }

    assert held == {(p.store, p.row): (p.advantage, p.weight) for p in places}
    training = {key for key, (_, weight) in held.items() if weight > 0}
    assert len(held) == 16
    assert training == {
        *((f"store-{number}", row) for number in (0, 3) for row in range(4)),
        ("store-1", 0),
        ("store-1", 1),
    }
    # Every minibatch's weights add up to one over its tokens: what is left out is in no denominator.
    sampled = {(g.reference, t.row): t.num_sampled for g in groups for t in g.trajectories}
    size = len(places) // num_minibatches
    for start in range(0, len(places), size):
        part = places[start : start + size]
        assert sum(p.weight * sampled[p.store, p.row] for p in part) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("given", "rewards", "turns"),
    [
        (None, [0.8, 0.8, -0.4], (0.3, 0.5)),
        ({"scale": 0.5}, [0.8, 0.4, -0.4], (0.15, 0.25)),
        ({"scale": 0.0}, [0.8, 0.0, -0.4], (0.0, 0.0)),
        ({"value": -0.5}, [0.8, -0.5, -0.4], (0.0, 0.0)),
    ],
)
def test_truncated_trajectories_train_with_a_reward_of_their_own(
    given: dict[str, float] | None, rewards: list[float], turns: tuple[float, ...]
) -> None:
    """NeMo-RL's and OpenRLHF's `stop_properly_penalty_coef`: a factor, or, below 0, the reward."""
    cut = trajectory(0.8, 1, stop=StopReason.LENGTH, turn_rewards=(0.3, 0.5))
    groups = [group(0, trajectory(0.8), cut, trajectory(-0.4, 2), greedy=0.1)]
    config = None if given is None else TruncatedRewardConfig.model_validate(given)
    (found,) = with_truncated_rewards(groups, config)
    assert [t.reward for t in found.trajectories] == pytest.approx(rewards)
    assert found.trajectories[1].turn_rewards == pytest.approx(turns)
    assert found.trajectories[1].rewards == cut.rewards
    assert found.greedy == groups[0].greedy


def test_advantages_are_of_the_reward_that_trains() -> None:
    config = OnlineConfig.model_validate(
        {
            **{"name": "grpo", "num_steps": 1, "num_prompts_per_step": 1, "num_generations_per_prompt": 2},
            **{"advantage": {"name": "group", "normalize": False}, "truncated_reward": {"scale": 0.0}},
        }
    )
    groups = [group(0, trajectory(1.0), trajectory(1.0, 1, stop=StopReason.LENGTH))]
    places = score(config, with_truncated_rewards(groups, config.truncated_reward))
    assert [place.advantage for place in places] == pytest.approx([0.5, -0.5])
