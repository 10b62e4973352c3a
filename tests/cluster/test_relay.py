"""Calls of a group through relays are those of one without: four ranks, of which a relay calls three."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from nemorl.cluster import group as group_module
from nemorl.cluster.errors import (
    DeadlineExceeded,
    GroupEnded,
    RelayLost,
    WorkerDied,
    WorkerFailed,
    WorkerHung,
)
from nemorl.cluster.group import Mesh, WorkerGroup
from nemorl.cluster.logs import process_of
from nemorl.cluster.placement import Placement, WorkerRequest, reserve
from nemorl.cluster.runtime import ClusterRuntime
from tests.cluster.recorders import start_recorders
from tests.selection import in_all

LIMITS = {"stage": "testing", "seconds": 60.0}


@pytest.fixture(autouse=True)
def small_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "FAN_OUT", 3)
    monkeypatch.setattr(group_module, "MIN_RELAYED", 4)


@pytest.fixture(scope="module")
def placement(runtime: ClusterRuntime) -> Iterator[Placement]:
    """Of its own: groups of other modules keep their places until the end of the folder."""
    wanted = [WorkerRequest("policy", 4)]
    own = asyncio.run(reserve(wanted, strategy="PACK", deadline_seconds=60, can_grow=False, environment={}))
    yield own
    own.release()


@pytest.fixture
def group(placement: Placement, tmp_path: Path) -> Iterator[WorkerGroup]:
    started = asyncio.run(start_recorders("policy", 4, placement, tmp_path, mesh=Mesh(same_share=2, data=2)))
    assert len(started._relays) == 2
    yield started
    asyncio.run(started.shutdown())


def test_answers_are_those_of_direct_calls(group: WorkerGroup) -> None:
    answers = asyncio.run(group.call("record", 1, three=3, **LIMITS))
    assert answers == [(rank, (1,), {"three": 3}) for rank in range(4)]
    answers = asyncio.run(group.call("record", "last", shards=["a", "b", "c", "d"], axis="rank", **LIMITS))
    assert [args for _, args, _ in answers] == [(name, "last") for name in "abcd"]
    shards = [{"rows": ray.put(np.arange(3) + 10 * number)} for number in range(2)]
    resolved = asyncio.run(group.call("record", shards=shards, resolve=True, **LIMITS))
    assert [list(args[0]["rows"]) for _, args, _ in resolved] == [[0, 1, 2]] * 2 + [[10, 11, 12]] * 2
    entries = group.tabulate([[shard["rows"]] for shard in shards] * 2)
    resolved = asyncio.run(group.call("record", shards=entries, axis="rank", resolve=True, **LIMITS))
    assert [list(args[0][0]) for _, args, _ in resolved] == [[0, 1, 2], [10, 11, 12]] * 2
    relays, group._relays = group._relays, ()  # lost since then
    resolved = asyncio.run(group.call("record", shards=entries, axis="rank", resolve=True, **LIMITS))
    assert [list(args[0][0]) for _, args, _ in resolved] == [[0, 1, 2], [10, 11, 12]] * 2
    group._relays = relays
    first = asyncio.run(group.call("record", 4, outputs="first", **LIMITS))
    assert first == [(0, (4,), {})]
    kept = asyncio.run(group.call("record", 5, keep="rows", outputs="output_ranks", **LIMITS))
    assert [answer[:2] for answer in ray.get(kept)] == [(0, (5,)), (2, (5,))]


def test_failures_name_the_rank_and_end_the_group(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkerFailed, match=r"policy rank 3 failed in stage 'testing'.*no disk") as failed:
        asyncio.run(group.call("fail_on", 3, "no disk", 0.0, ends_group=False, **LIMITS))
    assert failed.value.rank == 3
    late = {"stage": "testing", "seconds": 1.0}
    with pytest.raises(DeadlineExceeded, match=r"policy has not finished stage .testing. in 1 s"):
        asyncio.run(group.call("fail_on", 9, "no rank", 5.0, background=True, **late))  # all of them sleep
    os.kill(asyncio.run(group.call("process", **LIMITS))[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"policy rank 1 died") as died:
        asyncio.run(group.call("process", **LIMITS))
    assert died.value.rank == 1
    with pytest.raises(GroupEnded):
        asyncio.run(group.call("process", **LIMITS))
    assert asyncio.run(group.lost_one(10.0))
    asyncio.run(group.replace_all(60.0))
    assert len(set(asyncio.run(group.call("process", **LIMITS)))) == 4


def test_relays_find_a_rank_that_does_not_respond(group: WorkerGroup) -> None:
    group._health_seconds = 2.0
    processes = asyncio.run(group.call("process", **LIMITS))
    asyncio.run(group.call("sleep", 3.0, **LIMITS))
    os.kill(processes[3], signal.SIGSTOP)
    with pytest.raises(WorkerHung, match=r"policy hangs in stage 'testing': no response from rank 3 in 2 s"):
        asyncio.run(group.call("process", **LIMITS))
    assert asyncio.run(group.lost_one(10.0))


def test_each_rank_that_is_asked_has_its_answer_or_error(group: WorkerGroup) -> None:
    group.mesh = Mesh(data=4)
    processes = asyncio.run(group.ask("process", **LIMITS))
    assert len(set(processes.values())) == 4
    os.kill(processes[1], signal.SIGKILL)
    os.kill(processes[2], signal.SIGSTOP)
    answers = asyncio.run(group.ask("process", stage="testing", seconds=3.0))
    assert {rank: answers[rank] for rank in (0, 3)} == {rank: processes[rank] for rank in (0, 3)}
    assert isinstance(answers[1], WorkerDied)
    assert answers[1].rank == 1
    assert isinstance(answers[2], DeadlineExceeded)
    assert answers[2].ranks == (2,)
    assert not group.has_ended


@pytest.mark.parametrize("number", [signal.SIGKILL, *in_all(signal.SIGSTOP)])
def test_the_ranks_of_lost_relays_are_called_without_them(
    group: WorkerGroup, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "RELAY_SECONDS", 2.0)
    started = [process_of(relay.log) for relay in group._relays]
    first, second = (process[0] for process in started if process is not None)
    os.kill(first, number)
    with pytest.raises(RelayLost, match=r"policy did not complete stage 'testing': policy-relay"):
        asyncio.run(group.call("record", stage="testing", seconds=2.0, ends_group=False))
    assert len(group._relays) == 1
    answers = asyncio.run(group.call("record", shards=["a", "b", "c", "d"], axis="rank", **LIMITS))
    assert [args for _, args, _ in answers] == [("a",), ("b",), ("c",), ("d",)]
    os.kill(second, number)
    answers = asyncio.run(group.ask("record", stage="testing", seconds=2.0))
    assert [answer[0] for answer in answers.values()] == [0, 1, 2, 3]
    assert not group._relays
    assert [rank for rank, _, _ in asyncio.run(group.call("record", **LIMITS))] == [0, 1, 2, 3]


def test_a_relay_follows_the_members_of_its_group(group: WorkerGroup) -> None:
    group.mesh = Mesh(data=4)
    asyncio.run(group.call("record", **LIMITS))
    group.drop(group.workers[1])
    answers = asyncio.run(group.call("record", **LIMITS))
    assert [rank for rank, _, _ in answers] == [0, 2, 3]
    group.admit(asyncio.run(group.restart(1, 60.0)))
    answers = asyncio.run(group.call("record", **LIMITS))
    assert [rank for rank, _, _ in answers] == [0, 1, 2, 3]
