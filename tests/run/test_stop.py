"""Signals to a run: what is cancelled, what is finished, and what a second one does."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nemorl.run.stop import SIGNALS, StepCancelled, StopRequest


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers_as_before() -> Any:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(work: Callable[[StopRequest], Awaitable[Any]], seconds: float | None = None) -> StopRequest:
    """Run the work in a task that handles the signals."""
    stop = StopRequest(seconds)

    async def main() -> None:
        stop.install()
        await asyncio.wait_for(work(stop), 20)

    asyncio.run(main())
    return stop


@pytest.mark.parametrize("number", SIGNALS)
def test_sampling_is_cancelled_and_has_ended(number: signal.Signals) -> None:
    ended: list[str] = []

    async def sampling() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("sampling")

    async def work(stop: StopRequest) -> None:
        with stop.stepping():
            asyncio.get_running_loop().call_soon(send, number)
            with pytest.raises(StepCancelled):
                await stop.cancellable(sampling())
            assert ended == ["sampling"]

    assert run(work).signal is number


def test_other_work_is_finished() -> None:
    async def work(stop: StopRequest) -> None:
        with stop.stepping():
            send(signal.SIGTERM)
            for _ in range(5):
                await asyncio.sleep(0.01)  # the signal arrives here, and this continues
            assert stop.signal is signal.SIGTERM
            with pytest.raises(StepCancelled):
                await stop.cancellable(asyncio.sleep(20))

    assert not run(work).immediate


def test_without_a_signal_the_work_returns_its_result() -> None:
    async def seven() -> int:
        return 7

    async def fails() -> None:
        raise ValueError("no")

    async def work(stop: StopRequest) -> None:
        assert await stop.cancellable(seven()) == 7
        with pytest.raises(ValueError, match="no"):
            await stop.cancellable(fails())

    assert run(work).signal is None


def test_outside_of_steps_the_work_is_cancelled() -> None:
    async def work(stop: StopRequest) -> None:
        send(signal.SIGUSR1)
        await asyncio.sleep(20)

    with pytest.raises(asyncio.CancelledError):
        run(work)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_that_has_ended_writes_its_last_files_whatever_signal_comes(number: signal.Signals) -> None:
    async def work(stop: StopRequest) -> None:
        stop.ignore()
        send(number)

    stop = run(work)
    send(number)  # the loop is closed
    assert not stop.requested
    StopRequest.restore()
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_second_signal_ends_the_work_immediately() -> None:
    stops: list[StopRequest] = []

    async def work(stop: StopRequest) -> None:
        stops.append(stop)
        with stop.stepping():
            send(signal.SIGUSR1)
            await asyncio.sleep(0.01)
            send(signal.SIGTERM)
            await asyncio.sleep(20)

    with pytest.raises(asyncio.CancelledError):
        run(work)
    assert stops[0].signal is signal.SIGUSR1
    assert stops[0].immediate


def test_a_step_that_does_not_end_in_time_is_cancelled() -> None:
    stops: list[StopRequest] = []
    written: list[str] = []

    async def work(stop: StopRequest) -> None:
        stops.append(stop)
        stop.on_request = lambda: written.append("copy")
        with stop.stepping():
            send(signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        run(work, seconds=0.02)
    assert stops[0].expired
    assert not stops[0].immediate
    assert written == ["copy"]


def test_what_follows_a_step_is_not_cancelled() -> None:
    async def work(stop: StopRequest) -> None:
        with stop.stepping():
            send(signal.SIGTERM)
            while not stop.requested:
                await asyncio.sleep(0)
        while not stop.expired:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # as the write of a checkpoint

    assert run(work, seconds=0.1).expired
