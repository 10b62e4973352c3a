"""Async generators of workers, item by item."""

import asyncio
import re
from contextlib import aclosing

import pytest

from nemorl.cluster.errors import ClusterError, DeadlineExceeded, WorkerDied, WorkerFailed
from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.worker import Worker

from .conftest import StartFragile

LIMITS = {"stage": "sampling", "seconds": 30.0}


def collect_until_error(
    worker: Worker, method: str, *args: float, seconds: float = 30.0
) -> tuple[list[int], ClusterError]:
    """The items that came before the stream broke, and the error."""

    async def run() -> None:
        async for item in worker.stream(method, *args, stage="sampling", seconds=seconds):
            items.append(item)  # noqa: PERF401 - kept when the error comes

    items: list[int] = []
    with pytest.raises(ClusterError) as caught:
        asyncio.run(run())
    return items, caught.value


def test_items_come_while_the_generator_runs(generation: WorkerGroup):
    async def first() -> int:
        async with aclosing(generation.workers[0].stream("count", 2, 600.0, **LIMITS)) as stream:
            return await anext(stream)

    assert asyncio.run(first()) == 0


def test_streams_of_one_worker_overlap(generation: WorkerGroup):
    async def all_of_them() -> list[list[int]]:
        async def one() -> list[int]:
            return [item async for item in generation.workers[0].stream("meet", 6, **LIMITS)]

        return await asyncio.gather(*(one() for _ in range(6)))

    assert asyncio.run(all_of_them()) == [[6]] * 6


def test_leaving_early_cancels_the_generator(generation: WorkerGroup):
    worker = generation.workers[1]

    async def leave() -> int:
        before = await worker.call("times_cut_short", **LIMITS)
        async with aclosing(worker.stream("count", 1000, 0.05, **LIMITS)) as stream:
            async for _ in stream:
                break
        for _ in range(50):
            await asyncio.sleep(0.1)
            if count := await worker.call("times_cut_short", **LIMITS) - before:
                return count
        return 0

    assert asyncio.run(leave()) == 1


def test_an_error_comes_after_the_items_before_it(generation: WorkerGroup):
    items, error = collect_until_error(generation.workers[0], "count_then_fail", 2)
    assert items == [0, 1]
    assert isinstance(error, WorkerFailed)
    assert (error.group, error.rank, error.stage) == ("generation", 0, "sampling")
    assert (error.kind, error.message) == ("builtins.RuntimeError", "the stream broke")


def test_the_deadline_is_for_each_item(generation: WorkerGroup):
    async def slowly() -> list[int]:
        stream = generation.workers[0].stream("count", 6, 0.5, stage="sampling", seconds=2.0)
        return [item async for item in stream]

    assert asyncio.run(slowly()) == list(range(6))  # in 2.5 seconds at least


def test_a_stream_that_takes_too_long(generation: WorkerGroup):
    items, error = collect_until_error(generation.workers[0], "count", 2, 60.0, seconds=2.0)
    assert items == [0]
    assert isinstance(error, DeadlineExceeded)
    assert str(error).startswith(
        "generation has not finished stage 'sampling' in 2 s; no answer from rank 0."
    )
    assert re.search(r"in count for \d+\.\d s", error.where[0])
    assert asyncio.run(generation.call("plain", 1, **LIMITS)) == [2, 2]  # the worker itself is well


def test_a_worker_that_dies_in_a_stream_and_one_that_dies_behind_another(start_fragile: StartFragile):
    first, second = start_fragile("Streamer", concurrent=True).workers
    with pytest.raises(WorkerDied, match=r"fragile rank 1 died in stage 'asking'"):
        asyncio.run(first.call("ask_the_dying", second, **LIMITS))

    items, error = collect_until_error(first, "count_then_die", 2)
    assert items == [0, 1]
    assert isinstance(error, WorkerDied)
    assert (error.group, error.rank, error.stage) == ("fragile", 0, "sampling")
    assert error.last_lines[-1] == "about to die"
