"""Calls on healthy groups: SPMD order, shards, references, event loops."""

import asyncio
import os
import time
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import ray

from nemorl.cluster.errors import WorkerFailed
from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.worker import BusySpans

LIMITS = {"stage": "testing", "seconds": 30.0}


@dataclass(frozen=True)
class Share:
    """Something of ours that holds a reference."""

    rows: tuple[int, ...]
    store: object


def test_a_call_runs_on_every_rank_with_the_same_arguments(policy: WorkerGroup):
    answers = asyncio.run(policy.call("record", 1, "two", three=3, **LIMITS))
    assert answers == [(rank, (1, "two"), {"three": 3}) for rank in range(4)]


def test_calls_of_a_rank_run_in_order_and_in_one_thread(policy: WorkerGroup):
    async def overlap() -> list[list[list[int]]]:
        return await asyncio.gather(*(policy.call("record", i, **LIMITS) for i in range(5)))

    before = len(asyncio.run(policy.call("history", **LIMITS))[0])
    answers = asyncio.run(overlap())
    assert [a[0][1] for a in answers] == [(i,) for i in range(5)]
    assert [len(h) - before for h in asyncio.run(policy.call("history", **LIMITS))] == [5] * 4
    assert (
        len(
            set(
                zip(
                    asyncio.run(policy.call("thread", **LIMITS)),
                    asyncio.run(policy.call("thread", **LIMITS)),
                    strict=True,
                )
            )
        )
        <= 4
    )
    assert asyncio.run(policy.call("thread", **LIMITS)) == asyncio.run(policy.call("thread", **LIMITS))


def test_a_background_call_runs_while_another_is_not_done(policy: WorkerGroup):
    async def overlap() -> list[list[str]]:
        waiting = policy.call("wait_for_word", **LIMITS)
        return await asyncio.gather(waiting, policy.call("give_word", "go", background=True, **LIMITS))

    assert asyncio.run(overlap()) == [["go"] * 4, [None] * 4]


def test_a_failed_background_call_names_its_rank_and_leaves_the_group_alive(policy: WorkerGroup):
    with pytest.raises(WorkerFailed, match=r"policy rank 2 failed in stage 'testing'.*no disk"):
        asyncio.run(policy.call("fail_on", 2, "no disk", 0.0, background=True, **LIMITS))
    assert len(asyncio.run(policy.call("process", **LIMITS))) == 4


def test_ranks_of_one_data_parallel_rank_get_the_same_shard(policy: WorkerGroup):
    shards = [np.arange(3), np.arange(3) + 10]
    answers = asyncio.run(policy.call("record", "common", shards=shards, key=1, **LIMITS))
    assert [list(args[0]) for _, args, _ in answers] == [[0, 1, 2], [0, 1, 2], [10, 11, 12], [10, 11, 12]]
    assert all(args[1] == "common" and kwargs == {"key": 1} for _, args, kwargs in answers)


def test_a_shard_for_every_rank(policy: WorkerGroup):
    answers = asyncio.run(policy.call("record", shards=["a", "b", "c", "d"], axis="rank", **LIMITS))
    assert [args for _, args, _ in answers] == [("a",), ("b",), ("c",), ("d",)]
    with pytest.raises(ValueError, match="2 shards for 4 ranks of policy"):
        asyncio.run(policy.call("record", shards=["a", "b"], axis="rank", **LIMITS))


def test_answers_of_the_output_ranks_only(policy: WorkerGroup):
    answers = asyncio.run(policy.call("record", outputs="output_ranks", **LIMITS))
    assert [rank for rank, _, _ in answers] == [0, 2]


def test_nested_references_are_resolved_when_asked(policy: WorkerGroup):
    store = ray.put([5, 6, 7])
    share = Share(rows=(2, 0), store=store)
    nested = {"list": [store, 1], "share": share}
    (_, (resolved,), _), *_ = asyncio.run(policy.call("record", nested, resolve=True, **LIMITS))
    assert resolved == {"list": [[5, 6, 7], 1], "share": Share(rows=(2, 0), store=[5, 6, 7])}
    (_, (kept,), _), *_ = asyncio.run(policy.call("record", nested, **LIMITS))
    assert kept["share"].store == store


def test_threads_and_variables_are_set_before_the_worker_imports_anything(policy: WorkerGroup):
    assert asyncio.run(policy.call("threads_at_import", **LIMITS)) == ["3"] * 4
    assert asyncio.run(policy.call("environment", "GREETING", **LIMITS)) == ["hello"] * 4
    assert asyncio.run(policy.call("environment", "GLOO_SOCKET_IFNAME", **LIMITS)) == ["lo"] * 4


def test_ranks_live_in_processes_of_their_own(policy: WorkerGroup):
    assert len({*asyncio.run(policy.call("process", **LIMITS)), os.getpid()}) == 5


def test_an_asynchronous_worker_runs_plain_and_async_methods(generation: WorkerGroup):
    assert asyncio.run(generation.call("double", 4, **LIMITS)) == [8, 8]
    assert asyncio.run(generation.call("plain", 4, **LIMITS)) == [5, 5]
    numbers = {"a": ray.put([1, 2]), "b": [3]}
    assert asyncio.run(generation.call("total", numbers, resolve=True, **LIMITS)) == [6, 6]


def test_asynchronous_calls_overlap(generation: WorkerGroup):
    async def overlap() -> list[list[int]]:
        return await asyncio.gather(*(generation.call("gather", 8, **LIMITS) for _ in range(8)))

    assert asyncio.run(overlap()) == [[8, 8]] * 8


def test_a_worker_calls_another_through_its_handle(generation: WorkerGroup):
    first, second = generation.workers
    assert asyncio.run(first.call("ask", second, 21, **LIMITS)) == 42


def test_workers_run_at_the_niceness_of_the_driver(policy: WorkerGroup):
    assert asyncio.run(policy.call("niceness", **LIMITS)) == [os.nice(0)] * 4


def test_processes_are_named_by_group_and_rank(policy: WorkerGroup):
    pids = asyncio.run(policy.call("process", **LIMITS))
    assert [psutil.Process(pid).cmdline()[0] for pid in pids] == [
        f"nemorl policy {rank}" for rank in range(4)
    ]


def test_calls_under_way_are_split_where_their_spans_are_taken(monkeypatch: pytest.MonkeyPatch):
    now = 1.0
    monkeypatch.setattr("nemorl.cluster.worker.time.perf_counter", lambda: now)
    spans = BusySpans()
    with spans.busy():
        now = 2.0
        with spans.busy():
            now = 3.0
        assert sorted(spans.take(4.0)) == [(1.0, 4.0), (2.0, 3.0)]
        now = 5.0
    assert spans.take(6.0) == [(4.0, 5.0)]
    assert spans.take(7.0) == []


def test_calls_that_are_awaited_have_spans(policy: WorkerGroup):
    policy.spans.take(time.perf_counter())
    begin = time.perf_counter()
    asyncio.run(policy.call("record", **LIMITS))
    asyncio.run(policy.call("record", background=True, **LIMITS))
    end = time.perf_counter()
    ((first, last),) = policy.spans.take(end)
    assert begin < first < last < end
