"""What fails is reported at once, typed, with group, rank, stage and the worker's own words."""

import asyncio
import os
import pickle
import re
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from nemorl.cluster import group as group_module
from nemorl.cluster import worker as worker_module
from nemorl.cluster.errors import (
    ClusterError,
    DeadlineExceeded,
    GroupEnded,
    WorkerDied,
    WorkerFailed,
    WorkerHung,
)
from nemorl.cluster.group import WorkerGroup

from .conftest import StartFragile

LIMITS = {"stage": "training", "seconds": 60.0}


def alive(pids: list[int]) -> list[int]:
    """Processes that are still there after up to half a minute."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [p.pid for p in psutil.wait_procs(processes, timeout=30)[1]]


def test_an_error_in_one_rank_while_another_sleeps(
    start_fragile: StartFragile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_module, "GRACE_SECONDS", 0.1)  # no process dies of it here
    group = start_fragile()
    pids = asyncio.run(group.call("process", **LIMITS))
    with pytest.raises(WorkerFailed) as caught:
        asyncio.run(group.call("fail_on", 1, "the batch is empty", others_sleep=60.0, **LIMITS))
    assert "woke up" not in group.workers[0].log.read_text()
    error = caught.value
    assert (error.group, error.rank, error.stage) == ("fragile", 1, "training")
    assert (error.kind, error.message) == ("builtins.ValueError", "the batch is empty")
    assert str(error) == (
        "fragile rank 1 failed in stage 'training' with ValueError: the batch is empty "
        f"(traceback in {group.workers[1].log})"
    )
    log = group.workers[1].log.read_text()
    assert "Traceback (most recent call last)" in log
    assert "in fail_on" in log
    assert alive(pids) == []
    with pytest.raises(GroupEnded, match=r"cannot run 'process' in stage 'training'.*the batch is empty"):
        asyncio.run(group.call("process", **LIMITS))


def test_a_failure_that_leaves_every_rank_able_to_continue(start_fragile: StartFragile):
    group = start_fragile()
    with pytest.raises(WorkerFailed, match="the peer is gone"):
        asyncio.run(
            group.call("fail_on", 1, "the peer is gone", others_sleep=0.0, ends_group=False, **LIMITS)
        )
    assert len(asyncio.run(group.call("process", **LIMITS))) == 2
    asyncio.run(group.shutdown())
    assert all(worker.log.read_text().endswith("closed\n") for worker in group.workers)


def test_an_exception_that_cannot_be_unpickled(policy: WorkerGroup):
    with pytest.raises(WorkerFailed, match=r"NeedsTwo: one and two") as caught:
        asyncio.run(policy.workers[2].call("fail_unpicklable", **LIMITS))
    assert (caught.value.rank, caught.value.kind) == (2, "tests.cluster.targets.NeedsTwo")
    assert (
        len(asyncio.run(policy.call("process", **LIMITS))) == 4
    )  # the call was for one rank, and the group continues


def test_a_death_is_reported_once(start_fragile: StartFragile, caplog: pytest.LogCaptureFixture):
    """The error that ended the work reports it; what else dies by then is news."""
    for after, warnings in ((("fragile", 0), 0), (("fragile", 1), 1), (None, 1)):
        caplog.clear()
        group = start_fragile(ranks=1)
        (pid,) = asyncio.run(group.call("process", **LIMITS))
        os.kill(pid, signal.SIGKILL)
        assert alive([pid]) == []
        death = after and WorkerDied(*after, "sampling", "it vanished", Path("log"), ())
        asyncio.run(group.shutdown(after=death))
        assert [record.message.count("fragile rank 0 died") for record in caplog.records] == [1] * warnings


def test_an_error_while_the_worker_is_made(start_fragile: StartFragile):
    with pytest.raises(
        WorkerFailed, match=r"rank 0 failed in stage 'start fragile' with ValueError: no disk"
    ):
        start_fragile("Unmakable", ranks=1)


def test_a_killed_process(start_fragile: StartFragile):
    group = start_fragile()
    asyncio.run(group.call("say", "before the end", **LIMITS))
    pids = asyncio.run(group.call("process", **LIMITS))
    threading.Timer(0.2, os.kill, (pids[1], signal.SIGKILL)).start()
    with pytest.raises(WorkerDied) as caught:
        asyncio.run(group.call("sleep", 60.0, **LIMITS))
    assert "woke up" not in group.workers[0].log.read_text()
    error = caught.value
    assert (error.group, error.rank, error.stage) == ("fragile", 1, "training")
    assert error.last_lines[-1] == "native before the end"
    assert "before the end" in str(error)
    assert "\n" not in error.reason
    assert alive(pids) == []


def test_the_death_is_reported_rather_than_what_its_peer_says_about_it(start_fragile: StartFragile):
    group = start_fragile()
    with pytest.raises(WorkerDied, match=r"fragile rank 1 died in stage 'training'"):
        asyncio.run(group.call("lose_peer", 1, **LIMITS))


def test_a_native_crash_leaves_its_stack(start_fragile: StartFragile):
    group = start_fragile(ranks=1)
    with pytest.raises(WorkerDied, match=r"the process vanished: it crashed") as caught:
        asyncio.run(group.call("segfault", **LIMITS))
    told = "\n".join(caught.value.last_lines)
    assert "Fatal Python error: Segmentation fault" in told
    assert "in segfault" in told


def test_a_deadline_names_who_has_not_answered_and_where_it_is(start_fragile: StartFragile):
    group = start_fragile(ranks=1)
    pids = asyncio.run(group.call("process", **LIMITS))
    with pytest.raises(DeadlineExceeded) as caught:
        asyncio.run(group.call("sleep", 60.0, stage="logprobs", seconds=1.0))
    error = caught.value
    assert (error.group, error.ranks, error.stage, error.seconds) == ("fragile", (0,), "logprobs", 1.0)
    assert re.search(r"in sleep for \d\.\d s, at .*targets.py:\d+ in sleep", error.where[0])
    assert str(error).startswith("fragile has not finished stage 'logprobs' in 1 s; no answer from rank 0.")
    assert "in sleep" in group.workers[0].log.read_text()  # the stacks
    assert alive(pids) == []


def test_a_deadline_does_not_wait_for_a_stopped_process(
    start_fragile: StartFragile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_module, "ACTIVITY_SECONDS", 0.5)
    group = start_fragile()
    pids = asyncio.run(group.call("process", **LIMITS))
    os.kill(pids[1], signal.SIGSTOP)
    stopped = (
        rf"no answer from rank 1.*\n.*rank 1: does not respond; its process {pids[1]} is stopped \(state T"
    )
    with pytest.raises(DeadlineExceeded, match=stopped):
        asyncio.run(group.call("process", stage="logprobs", seconds=2.0))


def test_a_stopped_process_is_found_long_before_the_deadline_and_one_that_computes_is_none(
    start_fragile: StartFragile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_module, "ACTIVITY_SECONDS", 0.5)
    period = 2.0
    group = start_fragile(health_seconds=period)
    pids = asyncio.run(group.call("process", **LIMITS))
    asyncio.run(group.call("compute", 2.5 * period, **LIMITS))  # holds the interpreter's lock for most of it
    assert asyncio.run(group.call("process", **LIMITS)) == pids

    async def stop() -> float:
        both = (group.call("sleep", 60.0, background=background, **LIMITS) for background in (False, True))
        calls = [asyncio.create_task(call) for call in both]
        await asyncio.sleep(0.5)
        os.kill(pids[1], signal.SIGSTOP)
        began = time.monotonic()
        stopped = (
            rf"fragile hangs in stage 'training': no response from rank 1 in 2 s\n.*process {pids[1]} is"
        )
        with pytest.raises(WorkerHung, match=stopped):
            await calls[0]
        with pytest.raises(ClusterError):
            await calls[1]
        return time.monotonic() - began

    assert asyncio.run(stop()) < 2 * period + 0.5 + 5.0  # two periods, the description, a busy machine
    assert alive(pids) == []
    assert asyncio.run(group.lost_one(period))
    asyncio.run(group.replace_all(60.0))
    assert not asyncio.run(group.lost_one(30.0))


def test_a_cancelled_call_does_not_hold_up_the_shutdown(start_fragile: StartFragile):
    group = start_fragile(ranks=1)
    pids = asyncio.run(group.call("process", **LIMITS))

    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await group.call("sleep", 60.0, **LIMITS)
        await group.shutdown()

    asyncio.run(cancel())
    assert alive(pids) == []
    log = group.workers[0].log.read_text()
    assert "woke up" not in log
    assert "closed" not in log


@pytest.mark.parametrize(
    "error",
    [
        WorkerFailed("policy", 3, "training", "builtins.ValueError", "bad", Path("a.log")),
        WorkerDied("policy", 3, "training", "gone", Path("a.log"), ("last",)),
        DeadlineExceeded("policy", (1, 2), "training", 5.0, ("here", "there")),
    ],
)
def test_errors_travel_between_processes(error: Exception):
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_lost_processes_are_replaced(start_fragile: StartFragile):
    """Handles of the group stay valid; the targets are made with changed arguments."""
    group = start_fragile()
    pids = asyncio.run(group.call("process", **LIMITS))
    assert not asyncio.run(group.lost_one(30.0))
    os.kill(pids[1], signal.SIGKILL)
    assert alive(pids[1:]) == []
    assert asyncio.run(group.lost_one(30.0))
    asyncio.run(group.replace_all(60.0, rank=7))
    assert alive(pids) == []
    assert [rank for rank, _, _ in asyncio.run(group.call("record", **LIMITS))] == [7, 7]
    with pytest.raises(WorkerFailed):
        asyncio.run(group.call("fail_on", 7, "no loss", others_sleep=0.0, **LIMITS))
    assert not asyncio.run(group.lost_one(30.0))


def test_a_replacement_that_failed_counts_as_a_loss(start_fragile: StartFragile):
    """A rank may have failed because another one hangs; the next attempt starts all of them again."""
    group = start_fragile()
    with pytest.raises(WorkerFailed, match="no_such_argument"):
        asyncio.run(group.replace_all(60.0, no_such_argument=True))
    assert asyncio.run(group.lost_one(30.0))
    asyncio.run(group.replace_all(60.0))
    assert not asyncio.run(group.lost_one(30.0))
    assert len(asyncio.run(group.call("process", **LIMITS))) == 2


def test_a_process_that_is_stopped_while_it_ends(
    start_fragile: StartFragile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Ray sends no SIGKILL to one that has agreed to exit; here it sends nothing at all."""
    monkeypatch.setattr(group_module, "KILL_SECONDS", 0.1)
    group = start_fragile()
    stopped, running = asyncio.run(group.call("process", **LIMITS))
    os.kill(stopped, signal.SIGSTOP)
    with monkeypatch.context() as without:
        without.setattr(group_module.ray, "kill", lambda actor: None)
        group.kill(*group.workers)
        assert alive([stopped]) == []
    assert f"process {stopped} was stopped while it ended" in caplog.text
    assert psutil.pid_exists(running)
