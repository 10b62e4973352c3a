"""Signals to a run: what is cancelled, what is finished, and what a second one does."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemorl.errors import RunError
from nemorl.run.stop import SIGNALS, StepCancelled, StopRequest, run_to_end

from .runs import finish, start, tiny_model, write_experiment


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


def test_sigterm_ends_a_command_with_a_sentence_and_after_its_cleanup() -> None:
    ended: list[str] = []

    async def work() -> None:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL  # so Ray installs none of its own
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("cleanup")

    with pytest.raises(RunError, match=r"^Terminated immediately by a signal; all processes have ended\.$"):
        run_to_end(work())
    assert ended == ["cleanup"]


@pytest.mark.ci
@pytest.mark.parametrize("words", [("rollout", "--n", "400"), ("serve",)], ids=" ".join)
def test_sigterm_while_ray_runs_prints_no_trace(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Both start an engine, which takes seconds after Ray has started."""
    sampling = {"num_generations_per_prompt": 64, "kl": {"coefficient": 0}, "validation": {}}
    config = write_experiment(tmp_path, tiny_model(tmp_path / "model"), "ended", algorithm=sampling)
    command, *options = words
    process = start(command, config, *options)
    while not any("raylet" in child.name() for child in psutil.Process(process.pid).children()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    status, output = finish(process, seconds=120)
    assert status == 1, output
    assert output.rstrip().endswith("Terminated immediately by a signal; all processes have ended.")
    assert "SIGTERM received at" not in output
    assert "Traceback" not in output
