import pytest

from nemorl.rollout.schedule import TaskOrder


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
