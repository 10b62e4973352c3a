"""Told to stop: by a scheduler before a time limit or for another job, or by a person.

The first signal lets a run stop where its state is whole: sampling is dropped, since a resumed run samples
the same again, and everything else of a step is finished. The second one ends it at once.

When a run ends before its last step: a figure gets no better.
"""

import asyncio
import logging
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from nemorl.config.algorithm.base import EarlyStopConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StepCancelled(Exception):
    """Work was given up because the run was told to stop."""


class StopRequest:
    """What one run was told. Belongs to its event loop."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None  # the first signal
        self.at_once = False  # told again
        self._stepping = False
        self._told = asyncio.Event()

    def listen(self) -> None:
        """Hear the signals from now on, for the task that calls this. Again after whatever took them away."""
        work = asyncio.current_task()
        assert work is not None, "only a task can be ended"
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._hear, number, work)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, the work asks by itself whether it is to stop; outside a signal cancels it."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    async def drop(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives, unless the run is told to stop: then the work is cancelled.

        Raises `StepCancelled` once it has ended.
        """
        doing, told = asyncio.ensure_future(work), asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait({doing, told}, return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                raise StepCancelled
            return doing.result()
        finally:
            told.cancel()
            doing.cancel()
            await asyncio.wait({doing})
            _ = doing.cancelled() or doing.exception()  # which nobody else may look at

    def _hear(self, number: signal.Signals, work: "asyncio.Task[Any]") -> None:
        if self.by is not None:
            self.at_once = True
        elif self._stepping:
            logger.warning(
                "told to stop (%s): the step under way is dropped if it samples, and finished if not; "
                "a second signal ends the run at once",
                number.name,
            )
        self.by = self.by or number
        self._told.set()
        if self.at_once or not self._stepping:
            work.cancel()


@dataclass
class EarlyStop:
    """Watches a figure over a run; its state is in every checkpoint."""

    config: EarlyStopConfig | None
    best: float | None = None  # value so far
    waited: int = 0  # measurements since then

    def hear(self, metrics: dict[str, float]) -> bool:
        """Whether the run ends after a step with these figures; steps without the figure say nothing.

        A value that is no number is not better than any other.
        """
        if self.config is None or self.config.metric not in metrics:
            return self.over
        value = metrics[self.config.metric]
        if self._is_better(value):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.over

    @property
    def over(self) -> bool:
        """Whether the figure has got no better for as long as the config waits."""
        return self.config is not None and self.waited >= self.config.patience

    @property
    def metrics(self) -> dict[str, float]:
        """What a step's line says of it, and the report knows an ended run by."""
        return {} if self.config is None else {"early_stop/waited": float(self.waited)}

    def __str__(self) -> str:
        assert self.config is not None
        return (
            f"the run ends here: {self.config.metric} has not got better than {self.best} in "
            f"{self.waited} measurements (algorithm.early_stop)"
        )

    def _is_better(self, value: float) -> bool:
        assert self.config is not None
        if self.best is None:
            return value == value
        gain = value - self.best if self.config.higher_is_better else self.best - value
        return gain > self.config.min_delta
