"""Told to stop: by a scheduler before a time limit or for another job, or by a person.

The first signal lets a run stop where its state is whole: sampling is dropped, since a resumed run samples
the same again, and everything else of a step is finished. The second one ends it at once.
"""

import asyncio
import logging
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Dropped(Exception):
    """Work was given up because the run was told to stop."""


class Stop:
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

        Raises `Dropped` once it has ended.
        """
        doing, told = asyncio.ensure_future(work), asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait({doing, told}, return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                raise Dropped
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
