"""The accounting of groups, over random orders of finishing, losses, refusals and resumes."""

from collections import Counter

import numpy as np
import pytest

from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.rollout.schedule import (
    MAX_ATTEMPTS,
    CollectorPlan,
    DataPlace,
    Dropped,
    GroupSchedule,
    Refill,
    TaskOrder,
)
from nemorl.trajectories import StopReason

SIZE = 4  # groups of a step


def summary(group: int, version: int) -> GroupSummary:
    trajectory = TrajectorySummary(
        row=0, reward=1.0, rewards={}, num_tokens=5, num_sampled=3, num_turns=1, stop=StopReason.STOP,
        min_version=version, max_version=version, error=None, seconds_generation=0.0, seconds_environment=0.0,
    )  # fmt: skip
    return GroupSummary(group, group, f"reference {group}", (trajectory,))


def schedule(
    staleness: int, step: int = 0, place: DataPlace | None = None, refill: Refill | None = None
) -> GroupSchedule:
    plan = CollectorPlan(groups_per_step=SIZE, samples_per_group=2, max_staleness=staleness)
    return GroupSchedule(TaskOrder(50, 0, False), plan, step, place or DataPlace(), refill)


class Driver:
    """Runs a schedule with random events, and checks it at each."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.staleness = int(self.draw.integers(4))
        self.refill: Refill | None = None
        if self.draw.random() < 0.4:
            most = int(self.draw.integers(SIZE, 4 * SIZE))
            self.refill = Refill(lambda group: group.group % 3 != 1, max_groups=most)
        self.groups = schedule(self.staleness, refill=self.refill)
        self.version = 0
        self.began: dict[int, int] = {}  # the version under which each running group began
        self.handed_out: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()

    def turn(self) -> None:
        groups = self.groups
        for started in groups.start():
            assert started.group not in self.began
            self.began[started.group] = self.version
            self.kinds["started"] += 1
        assert groups.running == set(self.began)
        bound = (self.version + self.staleness + 1 - groups.steps_taken) * SIZE
        assert len(self.began) + groups.num_ready <= bound
        steps = groups.steps_taken
        batch = groups.take()
        self.count_dropped()
        if batch is not None:
            self.check_batch(batch, steps)
            self.handed_out.update(group.group for group in batch)
            self.kinds["handed out"] += len(batch)
            self.version += 1
            groups.advance(self.version)
            return
        assert self.began or groups.num_ready < SIZE
        if self.began:
            self.end_one()

    def count_dropped(self) -> None:
        self.kinds.update(dropped.reason for dropped in self.groups.dropped)
        self.handed_out.update(self.groups.given_up)
        self.groups.dropped.clear()
        self.groups.given_up.clear()

    def check_batch(self, batch: list[GroupSummary], steps: int) -> None:
        accepted = [group for group in batch if self.refill is None or self.refill.accepts(group)]
        assert all(steps - group.min_version <= self.staleness for group in accepted)
        if len(accepted) < SIZE:
            assert self.refill is not None
            assert len(batch) >= self.refill.max_groups

    def end_one(self) -> None:
        group = int(self.draw.choice(sorted(self.began)))
        began = self.began.pop(group)
        if self.draw.random() < 0.15:
            self.groups.drop(Dropped(group, "lost"))
        else:
            self.groups.finish(summary(group, began))

    def resume(self) -> None:
        """Continue from what a checkpoint has: what runs or is ready is lost."""
        self.count_dropped()
        self.kinds["lost in a resume"] += len(self.began) + self.groups.num_ready + self.groups.num_refused
        self.groups = schedule(self.staleness, self.groups.steps_taken, self.groups.place, self.refill)
        self.began.clear()


@pytest.mark.parametrize("seed", range(200))
def test_every_group_is_handed_out_once_and_none_is_too_old(seed: int) -> None:
    driver = Driver(seed)
    for _ in range(2000):
        driver.turn()
        if driver.draw.random() < 0.01:
            driver.resume()
        if driver.groups.steps_taken == 15:
            break
    else:
        pytest.fail("15 steps were not taken: the schedule does not go on")
    driver.count_dropped()
    groups = driver.groups
    assert set(driver.handed_out.values()) == {1}
    assert set(driver.handed_out) == {*range(groups.place.position), *groups.place.beyond}
    # Every attempt that was started ended somewhere.
    open_ = len(driver.began) + groups.num_ready + groups.num_refused
    assert driver.kinds.pop("started") == open_ + sum(driver.kinds.values())


def test_a_group_that_others_overtake_is_sampled_again_and_then_given_up() -> None:
    groups = schedule(staleness=1, step=5)
    slow, reasons = 0, []
    for version in range(5, 5 + 2 * MAX_ATTEMPTS + 1):
        groups.advance(version)
        started = groups.start()
        assert all(one.attempt == len(reasons) for one in started if one.group == slow)
        for one in sorted(groups.running - {slow}):
            groups.finish(summary(one, version))
        if version % 2 == 0 and slow in groups.running:
            groups.finish(summary(slow, version - 2))
        assert groups.take() is not None
        reasons += [dropped.reason for dropped in groups.dropped]
        groups.dropped.clear()
    assert reasons == ["too_old"] * MAX_ATTEMPTS
    assert groups.given_up == [slow]
    assert groups.place.position > slow


def test_the_oldest_groups_are_handed_out_first() -> None:
    groups = schedule(staleness=2, step=5)
    groups.start()
    for group, version in ((7, 5), (6, 4), (5, 5), (4, 3), (3, 5), (2, 4)):
        groups.finish(summary(group, version))
    batch = groups.take()
    assert batch is not None
    assert [group.group for group in batch] == [2, 3, 4, 6]


def test_a_resumed_run_samples_what_was_not_handed_out() -> None:
    groups = schedule(staleness=1)
    groups.start()
    for group in (1, 3, 4, 6):
        groups.finish(summary(group, 0))
    assert groups.take() is not None
    assert groups.place == DataPlace(0, (1, 3, 4, 6))
    resumed = schedule(staleness=1, step=1, place=groups.place)
    assert [one.group for one in resumed.start()] == [0, 2, 5, 7, 8, 9, 10, 11]
