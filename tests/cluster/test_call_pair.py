"""Long calls, whose answers are taken several at a time."""

import asyncio
from concurrent.futures import Future
from typing import cast

import pytest
import ray

from nemorl.cluster import worker as worker_module
from nemorl.cluster.errors import DeadlineExceeded, WorkerDied, WorkerFailed
from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.worker import Arrivals
from nemorl.simulate.simulation import run_in_virtual_time

from .conftest import StartFragile


def test_the_first_value_comes_as_a_reference(generation: WorkerGroup):
    first, second = asyncio.run(generation.workers[0].call_pair("pair", 0.5, stage="sampling", seconds=60.0))
    assert (ray.get(first), second) == ([0.5] * 3, 0.5)


def test_failures_name_the_rank_and_the_stage(generation: WorkerGroup):
    with pytest.raises(WorkerFailed, match=r"rank 1 failed in stage 'sampling' with ValueError: too early"):
        asyncio.run(generation.workers[1].call_pair("pair", -1.0, stage="sampling", seconds=60.0))


def test_an_answer_that_does_not_come_has_a_deadline(generation: WorkerGroup):
    late = r"generation has not finished stage 'sampling' in 0.5 s; no answer from rank 0.\n.* in pair for"
    with pytest.raises(DeadlineExceeded, match=late):
        asyncio.run(generation.workers[0].call_pair("pair", 3.0, stage="sampling", seconds=0.5))


def test_what_came_before_a_death_outlives_the_process(start_fragile: StartFragile):
    (worker,) = start_fragile("Streamer", ranks=1, concurrent=True).workers

    async def run() -> ray.ObjectRef:
        first, _ = await worker.call_pair("pair", 0.0, stage="sampling", seconds=60.0)
        waits = asyncio.create_task(worker.call_pair("pair", 600.0, stage="sampling", seconds=600.0))
        await asyncio.sleep(0)
        worker.send("exit_process", 1, stage="sampling")  # which awaits nothing
        with pytest.raises(WorkerDied, match=r"fragile rank 0 died in stage 'sampling'"):
            await waits
        return first

    assert ray.get(asyncio.run(run())) == [0.0] * 3


class Reference:
    """In the place of an ObjectRef."""

    def __init__(self) -> None:
        self.answer: Future[int] = Future()

    def future(self) -> Future[int]:
        return self.answer


def test_many_answers_are_taken_at_a_time_and_few_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_module, "_ARRIVAL_SECONDS", 1e-4)
    monkeypatch.setattr(worker_module, "_MAX_ARRIVAL_SECONDS", 1.0)

    async def times(count: int, pause: float, num_awaited: int = 1) -> list[float]:
        """When each answer is taken, if one comes after each pause."""
        loop = asyncio.get_running_loop()
        arrivals, began, taken = Arrivals(loop), loop.time(), list[float]()
        references = [Reference() for _ in range(count)]

        async def take(reference: Reference) -> None:
            await arrivals.answer(cast(ray.ObjectRef, reference), num_awaited)
            taken.append(loop.time() - began)

        waits = [asyncio.create_task(take(reference)) for reference in references]
        for reference in references:
            await asyncio.sleep(pause)
            reference.answer.set_result(1)
        await asyncio.gather(*waits)
        return taken

    assert run_in_virtual_time(times(2, 0.1)) == pytest.approx([0.1, 0.2])
    assert len(set(run_in_virtual_time(times(10, 0.1, num_awaited=100)))) == 2  # at first, and after a second
    taken = run_in_virtual_time(times(1000, 0.1))
    assert len(taken) == 1000
    assert all(0.1 * number - 1e-6 <= at <= 0.1 * number + 1.0 + 1e-6 for number, at in enumerate(taken, 1))
    assert 90 <= len(set(taken)) <= 300  # one in a second, until fewer than 100 are left


def test_an_answer_whose_caller_is_gone_is_dropped():
    async def run() -> list[int]:
        arrivals, references = Arrivals(asyncio.get_running_loop()), [Reference(), Reference()]
        answers = (arrivals.answer(cast(ray.ObjectRef, reference)) for reference in references)
        first, second = map(asyncio.ensure_future, answers)
        await asyncio.sleep(0)
        first.cancel()
        for number, reference in enumerate(references):
            reference.answer.set_result(number)
        return [await second]

    assert asyncio.run(run()) == [1]
