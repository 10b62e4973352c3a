"""Scoring in a separate process, for scorers that may hang on what a policy writes.

A computer algebra system computes `9**9**9**9` forever without returning to the interpreter: a thread cannot
be ended then, a process can. The limit is processor time, so that the load of the machine changes no reward.
"""

import asyncio
import logging
import math
import multiprocessing
import resource
import signal
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as ScorerTimeout
from importlib import import_module
from typing import TypeVar

from pebble import ProcessExpired, ProcessPool

_CLOSE_SECONDS = 10.0
_WALL_SECONDS = 300.0  # for a call that waits without computing
T = TypeVar("T")

log = logging.getLogger(__name__)


class ScoringProcess:
    """Calls scorers in one child process, which starts with the first call and is replaced when it dies."""

    def __init__(self, library: str, seconds: float, wall_seconds: float = _WALL_SECONDS) -> None:
        """Limit each call to `seconds` of processor time, rounded up; the child first imports `library`."""
        self._seconds, self._wall_seconds = seconds, wall_seconds
        # spawn: a fork would copy the locks of this process's threads in any state.
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPool(1, initializer=import_module, initargs=(library,), context=spawn)

    async def score(self, scorer: Callable[..., float], *arguments: object) -> float:
        """Return `scorer(*arguments)` like `call`, but 0 if the child exceeds a limit or dies."""
        return await self.call(scorer, *arguments) or 0.0

    async def call(self, function: Callable[..., T], *arguments: object) -> T | None:
        """Return `function(*arguments)`, a module-level function, or raise what it raises.

        None if the child exceeds a limit or dies.
        """
        given = self._seconds, function, *arguments
        call: Future[T] = self._pool.schedule(_limited, args=given, timeout=self._wall_seconds)
        try:
            return await asyncio.wrap_future(call)
        except ScorerTimeout:
            problem = f"took more than {self._wall_seconds:g} s"
        except ProcessExpired as error:
            problem = f"ended its process (exit code {error.exitcode})"
            if error.exitcode == -signal.SIGXCPU:
                problem = f"took more than {self._seconds:g} s of processor time"
        log.warning("%s %s and counts as 0", function.__name__, problem)
        return None

    async def close(self) -> None:
        """End the child, or leave it behind with a warning if it does not end in `_CLOSE_SECONDS`."""
        self._pool.stop()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._pool.join), _CLOSE_SECONDS)
        except TimeoutError:
            log.warning("the scoring process has not ended in %g s and is left behind", _CLOSE_SECONDS)


def _limited(seconds: float, function: Callable[..., T], *arguments: object) -> T:
    """In the child: the kernel ends it when it has computed for `seconds` from now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard < 0 else min(limit, hard), hard))
    return function(*arguments)
