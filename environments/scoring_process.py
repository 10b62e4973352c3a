"""Scoring in a process of its own, for scorers that may hang on what a policy writes.

`9**9**9**9` handed to a computer algebra system holds the interpreter for ever: a thread cannot be ended, a
process can. math-verify's own time limits are signals, which need the main thread that the child gives them.
"""

import asyncio
import logging
import multiprocessing
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as ScorerTimeout
from importlib import import_module
from typing import TypeVar

from pebble import ProcessExpired, ProcessPool

_CLOSE_SECONDS = 10.0
T = TypeVar("T")

log = logging.getLogger(__name__)


class ScoringProcess:
    """Calls scorers in one child process, which is replaced when it overruns or dies.

    The child starts with the first call, imports what the scorers need and ends with this object or with the
    process that made it.
    """

    def __init__(self, library: str, seconds: float) -> None:
        """`library` is imported when the child starts, so that `seconds`, the most one call may compute,
        do not count it.
        """
        self._seconds = seconds
        # spawn: a fork would copy the locks of this process's threads as they stand.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPool(
            max_workers=1, initializer=import_module, initargs=(library,), context=context
        )

    async def score(self, scorer: Callable[..., float], *arguments: object) -> float:
        """`scorer(*arguments)`, a module-level function. 0 when the child overruns or dies: no answer to be
        scored is worth more than one that cannot be. Raises what the scorer raises.
        """
        return await self.call(scorer, *arguments) or 0.0

    async def call(self, function: Callable[..., T], *arguments: object) -> T | None:
        """`function(*arguments)`, a module-level function; None when the child overruns or dies."""
        call: Future[T] = self._pool.schedule(function, args=arguments, timeout=self._seconds)
        try:
            return await asyncio.wrap_future(call)
        except ScorerTimeout:
            log.warning("%s took more than %g s and counts as 0", function.__name__, self._seconds)
        except ProcessExpired as error:
            log.warning(
                "%s ended its process (exit code %s) and counts as 0", function.__name__, error.exitcode
            )
        return None

    async def close(self) -> None:
        """End the child, or leave it behind with a warning where it does not end in `_CLOSE_SECONDS`."""
        self._pool.stop()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._pool.join), _CLOSE_SECONDS)
        except TimeoutError:
            log.warning("the scoring process has not ended in %g s and is left behind", _CLOSE_SECONDS)
