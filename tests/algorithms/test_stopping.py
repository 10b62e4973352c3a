"""Signals to a run: what is dropped, what is finished, and what a second one does."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nemorl.run.stop import SIGNALS, StepCancelled, StopRequest


def told(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers_as_before() -> Any:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def listening(work: Callable[[StopRequest], Awaitable[Any]]) -> StopRequest:
    """Run the work in a task that hears; gives what was heard."""
    stop = StopRequest()

    async def main() -> None:
        stop.listen()
        await asyncio.wait_for(work(stop), 20)

    asyncio.run(main())
    return stop


@pytest.mark.parametrize("number", SIGNALS)
def test_sampling_is_dropped_and_has_ended_then(number: signal.Signals) -> None:
    ended: list[str] = []

    async def sampling() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("sampling")

    async def work(stop: StopRequest) -> None:
        with stop.stepping():
            asyncio.get_running_loop().call_soon(told, number)
            with pytest.raises(StepCancelled):
                await stop.drop(sampling())
            assert ended == ["sampling"]

    assert listening(work).by is number


def test_what_may_not_be_dropped_is_finished() -> None:
    async def work(stop: StopRequest) -> None:
        with stop.stepping():
            told(signal.SIGTERM)
            for _ in range(5):
                await asyncio.sleep(0.01)  # the signal is heard here, and this goes on
            assert stop.by is signal.SIGTERM
            with pytest.raises(StepCancelled):
                await stop.drop(asyncio.sleep(20))

    assert not listening(work).at_once


def test_without_a_signal_the_work_gives_what_it_gives() -> None:
    async def seven() -> int:
        return 7

    async def fails() -> None:
        raise ValueError("no")

    async def work(stop: StopRequest) -> None:
        assert await stop.drop(seven()) == 7
        with pytest.raises(ValueError, match="no"):
            await stop.drop(fails())

    assert listening(work).by is None


def test_outside_of_steps_the_work_is_cancelled() -> None:
    async def work(stop: StopRequest) -> None:
        told(signal.SIGUSR1)
        await asyncio.sleep(20)

    with pytest.raises(asyncio.CancelledError):
        listening(work)


def test_a_second_signal_ends_the_work_at_once() -> None:
    stops: list[StopRequest] = []

    async def work(stop: StopRequest) -> None:
        stops.append(stop)
        with stop.stepping():
            told(signal.SIGUSR1)
            await asyncio.sleep(0.01)
            told(signal.SIGTERM)
            await asyncio.sleep(20)

    with pytest.raises(asyncio.CancelledError):
        listening(work)
    assert stops[0].by is signal.SIGUSR1
    assert stops[0].at_once
