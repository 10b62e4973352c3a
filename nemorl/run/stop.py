"""When a run ends before its last step: a signal, or a metric that no longer improves.

The first signal ends the run where its state is complete: sampling is cancelled, since a resumed run samples
the same again, and the rest of a step is finished. With `checkpointing.stop_seconds` it is dropped after half
of them; the other half is for the checkpoint. The second signal ends the run immediately.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from nemorl.config.algorithm.base import EarlyStopConfig
from nemorl.errors import RunError

logger = logging.getLogger(__name__)

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, which SIGTERM cancels unless it handles the signal itself. Raises RunError if cancelled.

    Without a handler before its start, Ray installs its own ones, which print a trace and abort the process.
    """

    async def terminable() -> T:
        task = asyncio.current_task()
        assert task is not None, "a coroutine that asyncio runs is a task"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(terminable())
    except asyncio.CancelledError:
        raise RunError("Terminated immediately by a signal; all processes have ended.") from None


class Interrupted(Exception):
    """Work was cancelled because of an event."""


async def interruptible(work: Coroutine[Any, Any, T], event: asyncio.Event) -> T:
    """Return the result of `work`, or cancel it when the event is set and raise `Interrupted`."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            raise Interrupted
        return task.result()
    finally:
        waiting.cancel()
        task.cancel()
        await asyncio.wait({task})
        _ = task.cancelled() or task.exception()  # else asyncio reports an exception never retrieved


class StepCancelled(Exception):
    """The step was cancelled because of a stop request."""


class StopRequest:
    """The stop request of one run, from signals. Belongs to the run's event loop."""

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds` from the first signal to the end of the run; None: as long as the step takes."""
        self.seconds = seconds
        self.expired = False  # half of `seconds` is over: nothing more is begun
        self.on_request: Callable[[], None] = lambda: None  # while a step continues for a part of `seconds`
        self.signal: signal.Signals | None = None  # the first one
        self.immediate = False  # a second one came
        self._stepping = False
        self._requested = asyncio.Event()

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def install(self) -> None:
        """Handle the signals for the task that calls this."""
        work = asyncio.current_task()
        assert work is not None, "only a task can be cancelled"
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number, work)

    def ignore(self) -> None:
        """Ignore the signals from now on, for a run that has ended: its last files are being written."""
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    @staticmethod
    def restore() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, the work checks `requested` between steps; outside, a signal cancels it."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    async def cancellable(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, or cancel it on a stop request and raise `StepCancelled`."""
        try:
            return await interruptible(work, self._requested)
        except Interrupted:
            raise StepCancelled from None

    def _receive(self, number: signal.Signals, work: "asyncio.Task[Any]") -> None:
        if self.signal is not None:
            self.immediate = True
        elif self._stepping:
            effect = "cancelling the step if it is sampling, finishing it otherwise"
            if self.seconds is not None:
                effect += f" if it ends within {self.seconds / 2:g} s"
                asyncio.get_running_loop().call_later(self.seconds / 2, self._expire, work)
                self.on_request()
            logger.warning("%s received: %s; a second signal ends the run immediately", number.name, effect)
        self.signal = self.signal or number
        self._requested.set()
        if self.immediate or not self._stepping:
            work.cancel()

    def _expire(self, work: "asyncio.Task[Any]") -> None:
        self.expired = True
        if self._stepping:
            work.cancel()


@dataclass
class EarlyStop:
    """Watches a metric over a run; its state is in every checkpoint."""

    config: EarlyStopConfig | None
    best: float | None = None  # value so far
    waited: int = 0  # measurements since then

    def update(self, metrics: dict[str, float]) -> bool:
        """True if the run ends after a step with these metrics, which may lack the metric or have NaN."""
        if self.config is None or self.config.metric not in metrics:
            return self.over
        value = metrics[self.config.metric]
        sign = 1 if self.config.higher_is_better else -1
        better = value == value if self.best is None else sign * (value - self.best) > self.config.min_delta
        self.best, self.waited = (value, 0) if better else (self.best, self.waited + 1)
        return self.over

    @property
    def over(self) -> bool:  # the metric has not improved for `patience` measurements
        return self.config is not None and self.waited >= self.config.patience

    def __str__(self) -> str:
        assert self.config is not None
        waited = f"has not improved on {self.best} in {self.waited} measurements"
        return f"early stop: {self.config.metric} {waited} (algorithm.early_stop)"
