import itertools
import json
from collections import Counter
from dataclasses import asdict

import pytest

from nemorl.config.data import DataConfig, TaskSamplingConfig
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.rollout.order import Feedback, PassRateOrder, Pool, Stage, StagedOrder, TaskOrder, order_of
from nemorl.trajectories import StopReason


def test_every_epoch_visits_every_task_once_in_another_order():
    order = TaskOrder(10, seed=1, shuffle=True)
    epochs = [[order.task_index(10 * epoch + i) for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_position_alone_decides_the_task():
    forward = [TaskOrder(7, seed=5, shuffle=True).task_index(p) for p in range(40)]
    order = TaskOrder(7, seed=5, shuffle=True)
    assert [order.task_index(p) for p in reversed(range(40))] == forward[::-1]
    assert forward != [TaskOrder(7, seed=6, shuffle=True).task_index(p) for p in range(40)]


def test_without_shuffling_the_dataset_repeats_as_it_is():
    order = TaskOrder(3, seed=1, shuffle=False)
    assert [order.task_index(p) for p in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_an_order_needs_a_task():
    assert [TaskOrder(1, seed=1, shuffle=True).task_index(p) for p in range(3)] == [0, 0, 0]
    with pytest.raises(ValueError, match="at least one task"):
        TaskOrder(0, seed=1, shuffle=False)


def test_a_window_is_visited_before_the_next_one_begins():
    order = TaskOrder(10, seed=3, shuffle=True, window=4)
    epochs = [[order.task_index(10 * epoch + i) for i in range(10)] for epoch in range(3)]
    for epoch in epochs:
        assert [sorted(epoch[:4]), sorted(epoch[4:8]), sorted(epoch[8:])] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9],
        ]
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_every_prefix_has_the_shares_of_the_sources():
    weights = [5.0, 2.0, 1.0]
    sizes = [7, 50, 3]
    pools = [Pool(range(100 * k, 100 * k + sizes[k]), weights[k]) for k in range(3)]
    order = StagedOrder([Stage(pools)], seed=1, shuffle=True)
    tasks = [order.task_index(position) for position in range(800)]
    for end in range(1, 801):
        for k, weight in enumerate(weights):
            count = sum(task // 100 == k for task in tasks[:end])
            assert abs(count - end * weight / sum(weights)) < len(weights)
    of_first = [task for task in tasks if task < 100]
    assert all(sorted(of_first[i : i + 7]) == list(range(7)) for i in range(0, len(of_first) - 6, 7))
    # A position alone decides: a resumed run asks for later ones only.
    again = StagedOrder([Stage(pools)], seed=1, shuffle=True)
    assert [again.task_index(position) for position in range(790, 800)] == tasks[790:]


@pytest.mark.parametrize("counts", [(12, 4), (5, 7, 4), (1, 15), (30, 36, 37, 20, 30, 3)])
def test_weights_that_are_the_prompts_of_a_step_are_exact_in_every_step(counts):
    size = sum(counts)
    pools = [Pool(range(100 * k, 100 * k + 50), weight) for k, weight in enumerate(counts)]
    order = StagedOrder([Stage(pools)], seed=1, shuffle=True)
    for step in range(300):
        drawn = Counter(order.task_index(size * step + place) // 100 for place in range(size))
        assert drawn == dict(enumerate(counts))


def test_a_source_is_left_out_after_its_epochs():
    order = StagedOrder([Stage([Pool(range(5), max_epochs=2), Pool(range(10, 13))])], seed=0, shuffle=True)
    tasks = [order.task_index(position) for position in range(60)]
    assert Counter(task for task in tasks if task < 10) == dict.fromkeys(range(5), 2)
    assert all(task >= 10 for task in tasks[20:])
    with pytest.raises(ValueError, match="without an end"):
        StagedOrder([Stage([Pool(range(5), max_epochs=2)])], seed=0, shuffle=True)


def config(**sections) -> DataConfig:
    return DataConfig.model_validate(sections)


SUMS = {"name": "arithmetic", "digits": 1, "size": 20}


def test_shares_follow_weights_sizes_and_temperature():
    """p_i is proportional to w_i ** (1 / T), with the number of tasks where there are no weights."""
    sources = {"a": {"dataset": SUMS}, "b": {"dataset": SUMS}}
    for temperature in (1.0, 2.0, 5.0):
        data = config(train={"name": "mixture", "sources": sources, "temperature": temperature})
        order = order_of(data, [900, 100], seed=1, groups_per_step=4)
        share = sum(order.task_index(position) >= 900 for position in range(4000)) / 4000
        expected = 100 ** (1 / temperature) / (900 ** (1 / temperature) + 100 ** (1 / temperature))
        assert share == pytest.approx(expected, abs=1 / 4000)  # at most a group away


def test_a_curriculum_admits_tasks_by_their_column_for_its_steps():
    stages = [{"steps": 3, "max": 1}, {"steps": 2, "min": 2, "max": 2}]
    data = config(train=SUMS, sampling={"curriculum": {"key": "level", "stages": stages}})
    levels = [index % 4 for index in range(20)]
    order = order_of(data, [20], seed=1, groups_per_step=4, levels=levels)
    seen = [levels[order.task_index(position)] for position in range(60)]
    assert set(seen[:12]) == {0, 1}
    assert set(seen[12:20]) == {2}
    assert Counter(order.task_index(position) for position in range(20, 60)) == dict.fromkeys(range(20), 2)
    # Without replacement also within a stage: ten tasks have level 0 or 1.
    assert len({order.task_index(position) for position in range(10)}) == 10


def result(position: int, task: int, rate: float, members: int = 4) -> GroupSummary:
    trajectories = tuple(
        TrajectorySummary(
            row=row, reward=float(row < rate * members), rewards={}, num_tokens=5, num_sampled=3, num_turns=1,
            stop=StopReason.STOP, min_version=0, max_version=0, error=None,
            seconds_generation=0.0, seconds_environment=0.0,
        )
        for row in range(members)
    )  # fmt: skip
    return GroupSummary(position, task, None, trajectories)


def by_pass_rate(size: int, seed: int = 1, **sampling) -> PassRateOrder:
    base = TaskOrder(size, seed, shuffle=True)
    return PassRateOrder(base, TaskSamplingConfig.model_validate(sampling), seed)


def test_tasks_outside_the_window_are_skipped_until_they_are_measured_again():
    """Against the rule written out: walk the epochs, pass over a task at most `max_skips` times in a row."""
    rates = {task: (task % 5) / 4 for task in range(10)}
    order = by_pass_rate(10, pass_rate={"min": 0.25, "max": 0.75, "max_skips": 2})
    drawn = []
    for position in range(60):
        drawn.append(order.task_index(position))
        order.hand_out([position], [result(position, drawn[-1], rates[drawn[-1]])])

    plain, expected, skips = TaskOrder(10, 1, shuffle=True), [], dict.fromkeys(range(10), 0)
    for place in itertools.count():
        if len(expected) == 60:
            break
        task = plain.task_index(place)
        known = place >= 10  # each task was measured in the first epoch
        if known and not 0.25 <= rates[task] <= 0.75 and skips[task] < 2:
            skips[task] += 1
        else:
            skips[task] = 0
            expected.append(task)
    assert drawn == expected


def test_replays_take_hard_tasks_in_proportion_to_their_failures():
    """p_i = (1 - r_i) ** e / sum over the hard tasks, in `share` of the groups; 0.5 is hard, 0.75 is not."""
    rates = [0.0, 0.25, 0.5, 0.75, 1.0]
    order = by_pass_rate(5, replay={"share": 0.4, "max_pass_rate": 0.5, "exponent": 2.0})
    replayed: Counter[int] = Counter()
    for position in range(20_000):
        order.take_metrics()
        task = order.task_index(position)
        if order.take_metrics()["sampling/replayed"]:
            replayed[task] += 1
        order.hand_out([position], [result(position, task, rates[task])])
    number = replayed.total()
    # Binomial: 5 standard deviations of the share and of each frequency.
    assert abs(number / 20_000 - 0.4) < 5 * (0.4 * 0.6 / 20_000) ** 0.5
    weights = [(1 - rate) ** 2 if rate <= 0.5 else 0.0 for rate in rates]
    for task, weight in enumerate(weights):
        p = weight / sum(weights)
        assert abs(replayed[task] / number - p) <= 5 * (p * (1 - p) / number) ** 0.5


def test_feedback_continues_where_a_checkpoint_was_written():
    sampling = {"pass_rate": {"min": 0.25, "max": 0.75}, "replay": {"share": 0.3}}
    rates = [(7 * task % 5) / 4 for task in range(12)]

    def run(order: PassRateOrder, positions: range) -> list[int]:
        tasks = []
        for position in positions:
            tasks.append(order.task_index(position))
            order.hand_out([position], [result(position, tasks[-1], rates[tasks[-1]])])
        return tasks

    whole = by_pass_rate(12, **sampling)
    run(whole, range(50))
    saved = json.loads(json.dumps(asdict(whole.feedback)))
    expected = run(whole, range(50, 120))
    resumed = by_pass_rate(12, **sampling)
    resumed.restore(Feedback.parse(**saved))
    assert run(resumed, range(50, 120)) == expected
    assert resumed.feedback == whole.feedback


def test_a_task_is_not_replayed_while_a_group_of_it_is_open():
    order = by_pass_rate(3, replay={"share": 0.99, "max_pass_rate": 0.5})
    first = [order.task_index(position) for position in range(3)]
    order.hand_out([0], [result(0, first[0], 0.0)])  # the only one that is known to be hard
    following = [order.task_index(position) for position in range(3, 6)]
    assert following.count(first[0]) <= 2  # replayed once; in the base order it comes once an epoch
    assert order.feedback.drawn[-1] == (5, following[-1])
