"""The accounting of groups, over random orders of finishing, losses, refusals and resumes."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from nemorl.config.data import ReplayConfig, TaskSamplingConfig
from nemorl.rollout.groups import DropReason, GroupSummary, TrajectorySummary
from nemorl.rollout.order import Order, PassRateOrder, TaskOrder
from nemorl.rollout.schedule import (
    MAX_ATTEMPTS,
    CollectorPlan,
    DataPlace,
    Dropped,
    GroupSchedule,
    Refill,
)
from nemorl.rollout.versions import UNBROKEN
from nemorl.run.checkpoints import Progress
from nemorl.trajectories import StopReason

SIZE = 4  # groups of a step


def summary(group: int, version: int, last: int | None = None, task: int | None = None) -> GroupSummary:
    trajectory = TrajectorySummary(
        row=0, reward=float(group % 2), rewards={}, num_tokens=5, num_sampled=3, num_turns=1,
        stop=StopReason.STOP, min_version=version, max_version=version if last is None else last, error=None,
        seconds_generation=0.0, seconds_environment=0.0,
    )  # fmt: skip
    return GroupSummary(group, group if task is None else task, f"reference {group}", (trajectory,))


def schedule(
    staleness: int,
    step: int = 0,
    place: DataPlace | None = None,
    refill: Refill | None = None,
    extra: int = 0,
    trains_discarded: bool = False,
    order: Order | None = None,
) -> GroupSchedule:
    plan = CollectorPlan(
        SIZE, 2, max_staleness=staleness, extra_groups=extra, trains_discarded=trains_discarded
    )
    return GroupSchedule(order or TaskOrder(50, 0, False), plan, step, place or DataPlace(), refill)


class Driver:
    """Runs a schedule with random events, and checks it at each."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.staleness = int(self.draw.integers(4))
        self.refill: Refill | None = None
        if self.draw.random() < 0.4:
            most = int(self.draw.integers(SIZE, 4 * SIZE))
            self.refill = Refill(lambda group: group.group % 3 != 1, max_groups=most)
        self.extra = int(self.draw.integers(1, SIZE)) if self.draw.random() < 0.5 else 0
        self.corrected = bool(self.draw.random() < 0.5)
        self.replays = 0
        self.tasks: dict[int, int] = {}  # of every group that was started
        self.groups = self.new_schedule(0, None)
        self.step = 0  # of the weights that sample
        self.lineage = UNBROKEN
        self.began: dict[int, int] = {}  # the version under which each running group began
        self.handed_out: Counter[int] = Counter()  # in the steps that count
        self.checkpoint = 0, DataPlace(), self.handed_out.copy()
        self.cut_off: Counter[int] = Counter()  # attempts at each group
        self.kinds: Counter[str] = Counter()

    def new_schedule(self, steps: int, place: DataPlace | None) -> GroupSchedule:
        sampling = TaskSamplingConfig(replay=ReplayConfig(share=0.3, max_pass_rate=0.5))
        self.order = PassRateOrder(TaskOrder(10_000, 0, False), sampling, seed=1)
        return schedule(self.staleness, steps, place, self.refill, self.extra, self.corrected, self.order)

    def turn(self) -> None:
        groups = self.groups
        for started in groups.start():
            assert started.group not in self.began
            assert self.tasks.setdefault(started.group, started.task_index) == started.task_index
            self.began[started.group] = self.lineage.version(self.step)
            self.kinds["started"] += 1
        assert groups.running == set(self.began)
        bound = (self.step + self.staleness + 1 - groups.steps_taken) * SIZE + self.extra
        assert len(self.began) + groups.num_ready <= bound
        steps = groups.steps_taken
        batch = groups.take()
        self.count_dropped()
        if batch is not None:
            self.check_batch(batch, steps)
            self.handed_out.update(group.group for group in batch)
            self.kinds["handed out"] += len(batch)
            self.end_cut_off()
            self.step += 1
            groups.advance(self.step)
            if self.draw.random() < 0.3:
                self.checkpoint = self.step, groups.resume_place, self.handed_out.copy()
            return
        assert self.began or groups.num_ready < SIZE
        if self.began:
            self.end_one()

    def count_dropped(self) -> None:
        self.kinds.update(dropped.reason for dropped in self.groups.dropped)
        self.cut_off.update(d.group for d in self.groups.dropped if d.reason == "cut_off")
        self.handed_out.update(self.groups.given_up)
        self.groups.dropped.clear()
        self.groups.given_up.clear()

    def check_batch(self, batch: list[GroupSummary], steps: int) -> None:
        accepted = [group for group in batch if self.refill is None or self.refill.accepts(group)]
        present = self.lineage.version(steps)
        for version in {version for group in accepted for version in group.trajectories[0].versions}:
            assert self.lineage.age(version, present) <= self.staleness
            assert self.corrected or not self.lineage.discarded(version)
        if len(accepted) < SIZE:
            assert self.refill is not None
            assert len(batch) >= self.refill.max_groups

    def end_cut_off(self) -> None:
        """What is cut off ends before the next weights, unless it finishes meanwhile."""
        cut_off = self.groups.cut_off
        assert cut_off == (set(self.began) if self.extra and not self.staleness else set())
        if cut_off:
            assert self.groups.num_ready == 0
        for group in cut_off:
            began = self.began.pop(group)
            if self.draw.random() < 0.8:
                self.groups.drop(Dropped(group, "cut_off"))
            else:
                assert not self.groups.finish(summary(group, began, task=self.tasks[group]))

    def end_one(self) -> None:
        group = int(self.draw.choice(sorted(self.began)))
        began = self.began.pop(group)
        if self.draw.random() < 0.15:
            self.groups.drop(Dropped(group, "lost"))
        else:
            self.groups.finish(summary(group, began, self.lineage.version(self.step), self.tasks[group]))

    def restart(self) -> None:
        """Return to the checkpoint: what was handed out since then is sampled again."""
        self.count_dropped()
        newest = self.lineage.version(max(self.step, self.groups.steps_taken))
        for group in self.handed_out - self.checkpoint[2]:  # sampled again, as at first
            del self.cut_off[group]
        self.step, place, self.handed_out = self.checkpoint[0], self.checkpoint[1], self.checkpoint[2].copy()
        self.lineage = self.lineage.restored(self.step, newest)
        self.groups.rewind(self.step, place, self.lineage)
        self.count_dropped()

    def resume(self) -> None:
        """Continue from what a checkpoint has: what runs or is ready is lost."""
        self.count_dropped()
        self.kinds["lost in a resume"] += len(self.began) + self.groups.num_ready + self.groups.num_refused
        self.replays += int(self.order.take_metrics()["sampling/replayed"])
        saved = Progress(self.groups.steps_taken).at(self.groups.resume_place)
        self.groups = self.new_schedule(saved.step, Progress.parse(saved.text).place)
        self.groups.lineage = self.lineage
        self.checkpoint = self.step, self.groups.resume_place, self.handed_out.copy()  # the newest there is
        self.began.clear()
        self.cut_off.clear()  # so are the numbers of attempts


@pytest.mark.parametrize("seed", range(200))
def test_every_group_is_handed_out_once_and_none_is_too_old(seed: int) -> None:
    driver = Driver(seed)
    for _ in range(2000):
        driver.turn()
        event = driver.draw.random()
        if event < 0.01:
            driver.resume()
        elif event < 0.02:
            driver.restart()
        if driver.groups.steps_taken == 15:
            break
    else:
        pytest.fail("15 steps were not taken: the schedule does not go on")
    driver.count_dropped()
    groups = driver.groups
    assert all(count < MAX_ATTEMPTS for count in driver.cut_off.values())
    assert set(driver.handed_out.values()) == {1}
    assert set(driver.handed_out) == {*range(groups.place.position), *groups.place.beyond}
    # The base order's tasks come once each, in spite of replays, drops, restarts and resumes.
    replays = driver.replays + int(driver.order.take_metrics()["sampling/replayed"])
    assert set(driver.tasks.values()) == set(range(driver.order.feedback.cursor))
    assert len(driver.tasks) == driver.order.feedback.cursor + replays
    # Every attempt that was started ended somewhere.
    open_ = len(driver.began) + groups.num_ready + groups.num_refused
    assert driver.kinds.pop("started") == open_ + sum(driver.kinds.values())


def run_to(groups: GroupSchedule, steps: int) -> list[GroupSummary]:
    """Groups end in order, sampled by the weights in use; the groups of the last step."""
    batch: list[GroupSummary] = []
    while groups.steps_taken < steps:
        groups.advance(groups.steps_taken)
        for one in groups.start():
            groups.finish(summary(one.group, groups.lineage.version(groups.steps_taken)))
        batch = groups.take() or []
    return batch


def test_after_a_restart_on_policy_steps_sample_the_same_groups_with_the_same_seeds() -> None:
    groups = schedule(staleness=0)
    run_to(groups, 2)
    place = groups.place
    expected = [group.group for group in run_to(groups, 3)]
    run_to(groups, 5)
    groups.rewind(2, place, UNBROKEN.restored(2, newest=5))
    groups.advance(2)
    again = groups.start()
    assert [one.group for one in again] == expected
    assert all(one.attempt == 0 for one in again)


@pytest.mark.parametrize("corrected", [False, True])
def test_ready_groups_outlive_a_restart_unless_discarded_updates_sampled_them(corrected: bool) -> None:
    place = DataPlace(12)
    groups = schedule(staleness=2, step=3, place=place, trains_discarded=corrected)
    first = [one.group for one in groups.start()]
    for group in first[:8]:
        groups.finish(summary(group, 3))
    trained = groups.take()
    assert trained is not None
    groups.advance(4)
    later = [one.group for one in groups.start()]
    for group in later:
        groups.finish(summary(group, 4))
    groups.rewind(3, place, UNBROKEN.restored(3, newest=5))
    assert groups.running == set(first[8:])
    assert {dropped.group for dropped in groups.dropped} == (set() if corrected else set(later))
    assert {dropped.reason for dropped in groups.dropped} <= {"discarded"}
    assert groups.num_ready == (8 if corrected else 4)
    again = [one.group for one in groups.start()]
    assert again == [group.group for group in trained][: len(again)]


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


def test_a_step_takes_the_first_to_finish_and_waits_for_what_was_cut_off_twice() -> None:
    groups = schedule(staleness=0, extra=2)
    slow = 0  # always the last
    for version in range(MAX_ATTEMPTS - 1):
        started = groups.start()
        assert len(started) == SIZE + 2
        assert next(one.attempt for one in started if one.group == slow) == version
        others = [one.group for one in started if one.group != slow]
        for group in others[:-1]:
            assert groups.take() is None
            groups.finish(summary(group, version))
        batch = groups.take()
        assert batch is not None
        assert [group.group for group in batch] == others[:-1]
        assert groups.cut_off == {slow, others[-1]}
        for group in sorted(groups.cut_off):
            groups.drop(Dropped(group, "cut_off", (3,)))
        assert groups.start() == []  # before the next weights
        groups.advance(version + 1)
    started = groups.start()
    for one in started[1:]:
        groups.finish(summary(one.group, MAX_ATTEMPTS - 1))
        assert groups.take() is None
    groups.finish(summary(slow, MAX_ATTEMPTS - 1))
    batch = groups.take()
    assert batch is not None
    assert batch[0].group == slow
    assert groups.given_up == []
    # What had finished too is counted with its lengths and rewards.
    assert groups.dropped[-1] == Dropped(started[-1].group, "cut_off", (3,), (1.0,))


def test_with_staleness_what_a_step_does_not_wait_for_continues() -> None:
    groups = schedule(staleness=1, extra=2)
    started = [one.group for one in groups.start()]
    assert started == list(range(2 * SIZE + 2))
    for group in started[:SIZE]:
        groups.finish(summary(group, 0))
    assert groups.take() is not None
    assert groups.cut_off == set()
    assert groups.running == set(started[SIZE:])
    groups.advance(1)
    assert len(groups.start()) == SIZE
    groups.finish(summary(started[-1], 0))
    assert groups.num_ready == 1


@pytest.mark.parametrize("reason", ["aborted", "deadline"])
def test_a_group_that_is_always_too_slow_is_given_up(reason: DropReason) -> None:
    groups = schedule(staleness=0)
    for attempt in range(MAX_ATTEMPTS):
        first = groups.start()[0]
        assert (first.group, first.attempt) == (0, attempt)
        groups.drop(Dropped(0, reason))
    assert groups.given_up == [0]
    assert groups.place == DataPlace(1)
    assert [one.group for one in groups.start()] == [SIZE]


def test_the_oldest_groups_are_handed_out_first() -> None:
    groups = schedule(staleness=2, step=5)
    groups.start()
    for group, version in ((7, 5), (6, 4), (5, 5), (4, 3), (3, 5), (2, 4)):
        groups.finish(summary(group, version))
    batch = groups.take()
    assert batch is not None
    assert [group.group for group in batch] == [2, 3, 4, 6]


def test_samples_of_engines_that_receive_no_weights_are_never_too_old() -> None:
    plan = CollectorPlan(SIZE, 2, max_staleness=0, fixed_weights=True)
    groups = GroupSchedule(TaskOrder(50, 0, False), plan, 5)
    assert groups.oldest_version == 0
    for one in groups.start():
        groups.finish(summary(one.group, 0))
    batch = groups.take()
    assert batch is not None
    assert len(batch) == SIZE
    assert groups.dropped == []


def test_a_resumed_run_samples_what_was_not_handed_out() -> None:
    groups = schedule(staleness=1)
    groups.start()
    for group in (1, 3, 4, 6):
        groups.finish(summary(group, 0))
    assert groups.take() is not None
    assert groups.place == DataPlace(0, (1, 3, 4, 6))
    resumed = schedule(staleness=1, step=1, place=groups.place)
    assert [one.group for one in resumed.start()] == [0, 2, 5, 7, 8, 9, 10, 11]


def test_a_group_of_the_place_of_a_resume_is_not_started_again():
    """Group 2 was handed out before the resume; the step that takes the others passes it."""
    plan = CollectorPlan(groups_per_step=2, samples_per_group=1, max_staleness=0)
    schedule = GroupSchedule(TaskOrder(10, 0, False), plan, 1, DataPlace(0, (2,)))
    started = [assignment.group for assignment in schedule.start()]
    assert started == [0, 1]
    for group in started:
        schedule.finish(GroupSummary(group, group, None, ()))
    assert schedule.take() is not None
    assert schedule.place == DataPlace(3)
    schedule.advance(2)
    assert [assignment.group for assignment in schedule.start()] == [3, 4]


def test_groups_on_a_lost_node_are_sampled_again() -> None:
    groups, lost = schedule(0), set[str]()
    groups.lost_nodes = lambda nodes: nodes & lost
    for assignment in groups.start():
        node = "second" if assignment.group % 2 else "first"
        groups.finish(replace(summary(assignment.group, 0), node=node))
    lost.add("second")
    assert groups.take() is None
    assert [(dropped.group, dropped.reason) for dropped in groups.dropped] == [(1, "lost"), (3, "lost")]
    again = groups.start()
    assert [(assignment.group, assignment.attempt) for assignment in again] == [(1, 1), (3, 1)]
    for assignment in again:
        groups.finish(replace(summary(assignment.group, 0), node="first"))
    taken = groups.take()
    assert taken is not None
    assert [group.group for group in taken] == [0, 1, 2, 3]
