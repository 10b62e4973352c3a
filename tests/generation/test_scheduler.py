"""Who waits, who runs, in which row."""

import numpy as np

from nemorl.generation.batching import ActiveSequence, Scheduler
from tests.generation.examples import request


def sequence(name, max_tokens=10):
    return ActiveSequence(request(np.arange(3, dtype=np.int32), name), arrival=0.0, max_tokens=max_tokens)


def scheduler_of(max_rows, max_tokens, names):
    scheduler = Scheduler(max_rows, lambda rows, length: rows * length <= max_tokens)
    members = {name: sequence(name, size) for name, size in names.items()}
    for member in members.values():
        scheduler.add(member)
    return scheduler, members


def rows_of(scheduler):
    return {member.request.id: row for row, member in scheduler.running()}


def test_admission_is_by_arrival_and_bounded_by_rows():
    scheduler, members = scheduler_of(2, 1000, {"a": 10, "b": 10, "c": 10})
    assert [(row, s.request.id) for row, s in scheduler.admit()] == [(0, "a"), (1, "b")]
    assert scheduler.admit() == []
    scheduler.remove(members["a"])
    assert [(row, s.request.id) for row, s in scheduler.admit()] == [(0, "c")]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 0)


def test_a_large_request_is_not_overtaken_and_gets_its_turn():
    scheduler, members = scheduler_of(8, 100, {"a": 30, "b": 30, "large": 90, "small": 5})
    scheduler.admit()
    assert rows_of(scheduler) == {"a": 0, "b": 1}
    scheduler.remove(members["a"])
    scheduler.compact()
    assert scheduler.admit() == [], "large does not fit beside b, and small must not pass it"
    scheduler.remove(members["b"])
    scheduler.admit()
    assert rows_of(scheduler) == {"large": 0}
    scheduler.remove(members["large"])
    scheduler.admit()
    assert rows_of(scheduler) == {"small": 0}


def test_gaps_are_closed_from_the_end():
    scheduler, members = scheduler_of(6, 1000, dict.fromkeys("abcdef", 10))
    scheduler.admit()
    for name in "acf":
        scheduler.remove(members[name])
    assert scheduler.compact() == ([4, 3], [0, 2])
    assert rows_of(scheduler) == {"e": 0, "b": 1, "d": 2}
    assert scheduler.compact() == ([], [])


def test_who_waits_can_leave_too():
    scheduler, members = scheduler_of(1, 1000, {"a": 10, "b": 10, "c": 10})
    scheduler.admit()
    scheduler.remove(members["b"])
    scheduler.remove(members["a"])
    scheduler.admit()
    assert rows_of(scheduler) == {"c": 0}
