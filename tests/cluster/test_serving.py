"""A process that answers while one of its methods runs."""

import asyncio

from nemorl.cluster.group import WorkerGroup

from .conftest import StartFragile

LIMITS = {"stage": "sampling", "seconds": 30.0}


def test_it_is_asked_and_streams_while_a_method_runs(start_fragile: StartFragile) -> None:
    group = start_fragile("Blocker", ranks=1)

    async def both() -> tuple[list[int], int, int]:
        """What streamed and the threads, of the method that ran and of what was asked meanwhile."""
        worker = group.workers[0]
        blocked = asyncio.ensure_future(group.call("block", **LIMITS))
        items = [item async for item in worker.stream("count", 3, **LIMITS)]
        asked = await worker.call("loop_thread", **LIMITS)
        assert not blocked.done()
        await worker.call("release", **LIMITS)
        return items, (await blocked)[0], asked

    items, own, asked = asyncio.run(both())
    assert items == [0, 1, 2]
    assert asked != own
    assert asyncio.run(group.call("thread", **LIMITS)) == [own], "plain methods share one thread"


def test_background_calls_have_a_thread_of_their_own(start_fragile: StartFragile) -> None:
    group: WorkerGroup = start_fragile("Blocker", ranks=1)

    async def beside() -> tuple[int, int]:
        blocked = asyncio.ensure_future(group.call("block", **LIMITS))
        (thread,) = await group.call("thread", background=True, **LIMITS)
        await group.workers[0].call("release", **LIMITS)
        return thread, (await blocked)[0]

    thread, own = asyncio.run(beside())
    assert thread != own
