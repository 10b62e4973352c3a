import asyncio

import numpy as np
import pytest

from nemorl.rollout.collector import (
    Collector,
    Dispatcher,
    RolloutFailed,
    SamplingStalled,
    sample_validation,
)
from nemorl.rollout.groups import Dropped, GroupAssignment, GroupSummary, summarize
from nemorl.rollout.order import TaskOrder
from nemorl.rollout.schedule import CollectorPlan, DataPlace, GroupSchedule, Refill
from nemorl.trajectories import StopReason, Trajectory, Turn


class StandInWorker:
    """Finishes a group when the test says so, or at once and newest first."""

    is_up = True

    def __init__(self, manual: bool = False):
        self.assignments = []
        self.calls = 0
        self.aborts = []
        self._manual = manual
        self._done: asyncio.Queue[int] = asyncio.Queue()

    def finish(self, *groups):
        for group in groups:
            self._done.put_nowait(group)

    async def abort_stale(self, oldest):
        self.aborts.append(oldest)

    async def run_groups(self, assignments):
        self.calls += 1
        self.assignments += assignments
        mine = {a.group: a for a in assignments}
        while mine:
            group = await self._done.get() if self._manual else max(mine)
            if group not in mine:  # of another call
                self._done.put_nowait(group)
                await asyncio.sleep(0)
                continue
            await asyncio.sleep(0)
            yield GroupSummary(group, mine.pop(group).task_index, f"reference {group}", ())


def collector(workers, *, staleness=0, position=0, version=0, seconds=5.0, texts=0, refill=None):
    plan = CollectorPlan(
        groups_per_step=4, samples_per_group=2, max_staleness=staleness, texts_per_step=texts
    )
    schedule = GroupSchedule(TaskOrder(10, seed=0, shuffle=False), plan, version, DataPlace(position), refill)
    return Collector(workers, schedule, seconds)


def groups(batch):
    return [summary.group for summary in batch]


def test_synchronous_steps_start_their_groups_and_get_them_in_order():
    async def main():
        workers = [StandInWorker(), StandInWorker()]
        sampling = collector(workers, texts=5)
        batches = []
        for version in range(3):
            sampling.advance(version)
            heard = []
            batches.append(await sampling.next_batch(heard.append))
            assert sum(heard) == 4
            assert sampling.place.position == 4 * (version + 1)
        await sampling.close()
        return workers, batches

    workers, batches = asyncio.run(main())
    assert [groups(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [s.task_index for s in batches[2]] == [8, 9, 0, 1]
    assert [s.reference for s in batches[0]] == [f"reference {g}" for g in range(4)]
    # Spread evenly, one call for each worker and step.
    assert [a.group for a in workers[0].assignments] == [0, 2, 4, 6, 8, 10]
    assert [w.calls for w in workers] == [3, 3]
    assert {a.num_samples for a in workers[0].assignments} == {2}
    # Five texts of a step over four groups: two from the first, one from each of the others.
    assert [a.num_texts for a in workers[0].assignments[:2] + workers[1].assignments[:2]] == [2, 1, 1, 1]


def test_a_resumed_run_continues_at_its_position_whatever_the_size_of_earlier_steps():
    async def main():
        sampling = collector([StandInWorker()], position=11, version=2)
        sampling.advance(2)
        return await sampling.next_batch()

    assert groups(asyncio.run(main())) == [11, 12, 13, 14]


@pytest.mark.parametrize(("staleness", "started"), [(0, [4, 8, 12]), (1, [8, 12, 16]), (3, [16, 20, 24])])
def test_no_group_starts_that_would_be_too_old(staleness, started):
    async def main():
        worker = StandInWorker(manual=True)
        sampling = collector([worker], staleness=staleness)
        counts = []
        for version in range(3):
            sampling.advance(version)
            sampling.advance(version)  # the same weights allow nothing more
            await asyncio.sleep(0.01)
            counts.append(len(worker.assignments))
        await sampling.close()
        return counts

    assert asyncio.run(main()) == started


@pytest.mark.parametrize("staleness", [0, 3])
def test_nothing_is_sampled_for_steps_beyond_the_last(staleness):
    async def main():
        worker = StandInWorker()
        plan = CollectorPlan(groups_per_step=4, samples_per_group=2, max_staleness=staleness, num_steps=2)
        schedule = GroupSchedule(TaskOrder(10, seed=0, shuffle=False), plan)
        sampling = Collector([worker], schedule, 5)
        for version in range(2):
            sampling.advance(version)
            await sampling.next_batch()
        sampling.advance(2)
        await asyncio.sleep(0)
        await sampling.close()
        return worker

    assert [a.group for a in asyncio.run(main()).assignments] == list(range(8))


def test_with_staleness_a_batch_is_what_finished_first():
    async def main():
        worker = StandInWorker(manual=True)
        sampling = collector([worker], staleness=1)
        sampling.advance(0)
        worker.finish(5, 0, 7, 2, 1)
        first = await sampling.next_batch()
        positions = [sampling.place.position]
        sampling.advance(1)
        worker.finish(3, 4, 6)
        second = await sampling.next_batch()
        positions.append(sampling.place.position)
        await sampling.close()
        return groups(first), groups(second), positions

    first, second, positions = asyncio.run(main())
    assert first == [0, 2, 5, 7]
    assert second == [1, 3, 4, 6]
    # Group 1 was still out after the first batch; after the second nothing is.
    assert positions == [1, 8]


def test_a_group_starts_again_while_others_of_its_first_call_run():
    """A group that was too old when it was taken: its worker still samples what came with it."""

    async def main():
        worker = StandInWorker(manual=True)
        dispatcher = Dispatcher([worker], 5.0)
        dispatcher.start([GroupAssignment(0, 0, 1), GroupAssignment(1, 1, 1)])
        worker.finish(0)
        finished = [await dispatcher.next()]
        dispatcher.start([GroupAssignment(0, 0, 1, attempt=1)])
        for group in (1, 0):  # the first call ends before the second
            worker.finish(group)
            finished.append(await dispatcher.next())
        await dispatcher.close()
        return groups(finished)

    assert asyncio.run(main()) == [0, 1, 0]


def taught_by(*numbers):
    """Groups of these ids are accepted, up to 10 of a step are sampled."""
    return Refill(accepts=lambda group: group.group in numbers, max_groups=10)


async def steps(sampling, first, last):
    """Groups and position of steps, each after its weights have come."""
    found = []
    for version in range(first, last):
        sampling.advance(version)
        heard = []
        found.append((groups(await sampling.next_batch(heard.append)), sampling.place.position, sum(heard)))
    await sampling.close()
    return found


# Groups 2, 4, 5, 9 | 10, 11, 12, 13 | none of 14 to 23 but 20.
GOOD = taught_by(2, 4, 5, 9, 10, 11, 12, 13, 20)
REFILLED = [
    (list(range(10)), 10, 4),
    (list(range(10, 14)), 14, 4),
    (list(range(14, 24)), 24, 1),  # all that a step may sample
]


@pytest.mark.parametrize("workers", [1, 3])
def test_refused_groups_are_replaced_until_enough_are_accepted(workers):
    working = [StandInWorker() for _ in range(workers)]
    assert asyncio.run(steps(collector(working, refill=GOOD), 0, 3)) == REFILLED
    # No group was started beyond what a step may sample.
    assert sorted(a.group for w in working for a in w.assignments) == list(range(24))


@pytest.mark.parametrize("shuffle", range(5))
def test_what_is_sampled_does_not_depend_on_who_finishes_first(shuffle):
    class Whimsical(StandInWorker):
        async def run_groups(self, assignments):
            for _ in range(draw.integers(6)):
                await asyncio.sleep(0)
            for a in draw.permutation(assignments):
                await asyncio.sleep(0)
                yield GroupSummary(a.group, a.task_index, f"reference {a.group}", ())

    draw = np.random.default_rng(shuffle)
    found = asyncio.run(steps(collector([Whimsical(), Whimsical()], refill=GOOD), 0, 3))
    assert found == REFILLED


@pytest.mark.parametrize("done", [1, 2])
def test_a_resumed_run_refuses_and_replaces_the_same_groups(done):
    position = REFILLED[done - 1][1]
    sampling = collector([StandInWorker()], position=position, version=done, refill=GOOD)
    assert asyncio.run(steps(sampling, done, 3)) == REFILLED[done:]


def test_with_staleness_each_refused_group_starts_one_more():
    good = {0, 2, 3, 4, 5, 6, 7, 9}

    async def main():
        worker = StandInWorker()
        sampling = collector([worker], staleness=1, refill=taught_by(*good))
        batches = []
        for version in range(2):
            sampling.advance(version)
            batches.append(groups(await sampling.next_batch()))
        await asyncio.sleep(0)
        await sampling.close()
        return batches, len(worker.assignments)

    (first, second), started = asyncio.run(main())
    assert not set(first) & set(second)
    assert [len(good & set(batch)) for batch in (first, second)] == [4, 4]
    refused = len(set(range(started)) - good)
    assert 8 < started <= 3 * 4 + refused


def test_groups_that_are_dropped_without_end_are_a_stall():
    class DroppingWorker(StandInWorker):
        async def run_groups(self, assignments):
            for assignment in assignments:
                await asyncio.sleep(0.01)
                yield Dropped(assignment.group, "deadline")

    async def main():
        sampling = collector([DroppingWorker()], seconds=0.05)
        sampling.advance(0)
        try:
            await asyncio.wait_for(sampling.next_batch(), 30.0)
        finally:
            await sampling.close()

    with pytest.raises(SamplingStalled, match=r"no group finished within 0\.05 s"):
        asyncio.run(main())


def test_a_stall_names_who_is_waited_for():
    async def main():
        workers = [StandInWorker(manual=True), StandInWorker(manual=True)]
        sampling = collector(workers, seconds=0.05)
        sampling.advance(0)
        workers[0].finish(0, 2)
        workers[1].finish(3)
        try:
            await sampling.next_batch()
        finally:
            await sampling.close()

    with pytest.raises(
        RolloutFailed,
        match=r"no group finished within 0\.05 s.*3 of 4 ready; waiting for worker 1: groups 1$",
    ):
        asyncio.run(main())


def test_a_deadline_that_no_group_can_meet_ends_the_run():
    class Late(StandInWorker):
        async def run_groups(self, assignments):
            async for summary in super().run_groups(assignments):
                yield Dropped(summary.group, "deadline")

    async def main():
        sampling = collector([Late()])
        sampling.advance(0)
        try:
            await sampling.next_batch()
        finally:
            await sampling.close()

    with pytest.raises(SamplingStalled, match="120 groups in a row missed their deadline: raise algorithm"):
        asyncio.run(main())


@pytest.mark.parametrize(("num_failing", "ends"), [(11, False), (12, True)])
def test_groups_that_fail_are_sampled_again_until_nothing_else_comes(num_failing, ends):
    class Failing(StandInWorker):
        async def run_groups(self, assignments):
            async for summary in super().run_groups(assignments):
                failed = self.assignments.index(next(a for a in assignments if a.group == summary.group))
                yield Dropped(summary.group, "failed") if failed < num_failing else summary

    async def main():
        sampling = collector([Failing()])
        sampling.advance(0)
        try:
            return await sampling.next_batch()
        finally:
            await sampling.close()

    if ends:
        with pytest.raises(RolloutFailed, match="12 groups in a row were dropped"):
            asyncio.run(main())
    else:
        assert len(asyncio.run(main())) == 4


def test_a_failing_worker_ends_the_wait():
    class Dies:
        is_up = True

        async def run_groups(self, assignments):
            yield GroupSummary(0, 0, None, ())
            raise ConnectionError("node lost")

    class Leaves:
        is_up = True

        async def run_groups(self, assignments):
            yield GroupSummary(0, 0, None, ())

    async def main(worker):
        plan = CollectorPlan(4, 1, 0)
        sampling = Collector([worker], GroupSchedule(TaskOrder(4, 0, False), plan), 5.0)
        sampling.advance(0)
        await sampling.next_batch()

    with pytest.raises(ConnectionError, match="node lost"):
        asyncio.run(main(Dies()))
    with pytest.raises(RolloutFailed, match="rollout worker 0 ended without groups 1, 2, 3"):
        asyncio.run(main(Leaves()))


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (8, "0, 1, 2, 3, 4, 5, 6, 7"),
        (9, "0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
        (30, "0, 1, 2, 3, 4, 5, 6, 7 and 22 more"),
    ],
)
def test_up_to_eight_missing_groups_are_named(count, named):
    class Leaves:
        is_up = True

        async def run_groups(self, assignments):
            return
            yield

    async def main():
        schedule = GroupSchedule(TaskOrder(4, 0, False), CollectorPlan(count, 1, 0))
        sampling = Collector([Leaves()], schedule, 5.0)
        sampling.advance(0)
        await sampling.next_batch()

    with pytest.raises(RolloutFailed) as failed:
        asyncio.run(main())
    assert str(failed.value) == f"rollout worker 0 ended without groups {named}"


def trajectory_of(versions, **fields):
    """Tokens of these weights; -1 for those that were not sampled."""
    size = len(versions)
    given = {
        "tokens": np.arange(size, dtype=np.int32),
        "loss_mask": np.array(versions) >= 0,
        "logprobs": np.zeros(size, dtype=np.float32),
        "versions": np.array(versions, dtype=np.int32),
        "turns": (Turn(1, size, StopReason.STOP),),
        "rewards": {"exact": 0.5},
        "reward": 0.25,
        "stop": StopReason.STOP,
        "group": 5,
        "task": 7,
        "error": None,
    }
    return Trajectory(**given | fields)


def test_a_summary_has_the_oldest_and_newest_weights_of_sampled_tokens():
    summary = summarize([trajectory_of([-1, 0, 0, -1, 2])], 3)
    assert (summary.row, summary.reward, summary.num_tokens, summary.num_sampled) == (3, 0.25, 5, 3)
    assert (summary.min_version, summary.max_version) == (0, 2)
    assert (summary.trains, summary.error) == (True, None)


def test_a_failed_trajectory_does_not_train():
    failed = trajectory_of([-1, -1], turns=(), stop=StopReason.ERROR, error="environment reset: no room")
    summary = summarize([failed], 0)
    assert (summary.trains, summary.error) == (False, "environment reset: no room")
    assert (summary.min_version, summary.max_version, summary.num_turns) == (-1, -1, 0)


def test_validation_samples_the_first_tasks_in_order():
    workers = [StandInWorker(), StandInWorker()]
    batch = asyncio.run(sample_validation(workers, 5, 3, 5.0, num_texts=1))
    assert groups(batch) == [0, 1, 2, 3, 4]
    asked = workers[0].assignments + workers[1].assignments
    assert all(a.validation and a.num_samples == 3 and a.task_index == a.group for a in asked)
    assert sum(a.num_texts for a in asked) == 1
    silent = StandInWorker()
    asyncio.run(sample_validation([silent], 2, 3, 5.0))
    assert [a.num_texts for a in silent.assignments] == [0, 0]


class Returning(StandInWorker):
    """Loses its groups after the first, and works again when the test says so."""

    def __init__(self):
        super().__init__()
        self.back = asyncio.Event()
        self.back.set()
        self.losses = 1

    @property
    def is_up(self):
        return self.back.is_set()

    async def run_groups(self, assignments):
        await self.back.wait()
        if not self.losses:
            async for group in super().run_groups(assignments):
                yield group
            return
        self.losses -= 1
        self.assignments += assignments
        first, *lost = assignments
        yield GroupSummary(first.group, first.task_index, "kept", ())
        self.back.clear()
        for assignment in lost:
            yield Dropped(assignment.group, "lost")


@pytest.mark.parametrize("others", [0, 1])
def test_groups_of_a_lost_worker_are_sampled_again_by_others_or_when_it_returns(others):
    async def main():
        lost, rest = Returning(), [StandInWorker() for _ in range(others)]
        sampling = collector([lost, *rest])
        sampling.advance(0)
        step = asyncio.create_task(sampling.next_batch())
        await asyncio.sleep(0.02)
        assert step.done() == bool(others)
        lost.back.set()
        first = await step
        dropped, given_up = sampling.take_dropped()
        sampling.advance(1)
        second = await sampling.next_batch()
        await sampling.close()
        return lost, first, dropped, given_up, second

    lost, first, dropped, given_up, second = asyncio.run(main())
    assert (groups(first), groups(second)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert first[0].reference == "kept"
    again = [2] if others else [1, 2, 3]
    assert [(d.group, d.reason) for d in dropped] == [(group, "lost") for group in again]
    assert given_up == 0
    if not others:
        assert [(a.group, a.attempt) for a in lost.assignments[4:7]] == [(1, 1), (2, 1), (3, 1)]
    assert {a.group for a in lost.assignments} & {4, 5, 6, 7}  # it gets groups again


def test_a_validation_samples_lost_tasks_again():
    async def main():
        lost = Returning()
        counted = []
        validation = asyncio.create_task(sample_validation([lost], 4, 2, 5.0, on_finished=counted.append))
        await asyncio.sleep(0.02)
        lost.back.set()
        return await validation, lost, counted

    batch, lost, counted = asyncio.run(main())
    assert groups(batch) == [0, 1, 2, 3]
    assert counted == [1] * 4
    assert [(a.group, a.attempt, a.validation) for a in lost.assignments[4:]] == [
        (1, 1, True), (2, 1, True), (3, 1, True)
    ]  # fmt: skip


def test_a_group_that_is_sampled_again_is_not_missing_from_its_first_call():
    class Aborts(StandInWorker):
        async def run_groups(self, assignments):
            self.calls += 1
            if self.calls == 1:
                yield Dropped(0, "aborted", 5)
                await asyncio.sleep(0.01)  # meanwhile group 0 is given to it again
                for a in assignments[1:]:
                    yield GroupSummary(a.group, a.task_index, None, ())
            else:
                await asyncio.sleep(0.03)
                yield GroupSummary(0, 0, None, ())

    async def main():
        sampling = collector([Aborts()])
        sampling.advance(0)
        return await sampling.next_batch()

    assert groups(asyncio.run(main())) == [0, 1, 2, 3]
