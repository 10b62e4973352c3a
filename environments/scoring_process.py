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
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as ScorerTimeout
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from nemorl.trajectories import Step

_CLOSE_SECONDS = 10.0
_WALL_SECONDS = 300.0  # for a call that waits without computing
T = TypeVar("T")

log = logging.getLogger(__name__)


class ScoringProcess:
    """Calls scorers in one child process, which starts with the first call and is replaced when it dies.

    A call whose child dies for another reason than its limits is repeated once: the kernel may have ended it.
    """

    def __init__(self, library: str, seconds: float, wall_seconds: float = _WALL_SECONDS) -> None:
        """Limit each call to `seconds` of processor time, rounded up; the child first imports `library`."""
        self._seconds, self._wall_seconds = seconds, wall_seconds
        # spawn: a fork would copy the locks of this process's threads in any state.
        spawn = multiprocessing.get_context("spawn")
        self._new_pool = partial(
            ProcessPool, 1, initializer=import_module, initargs=(library,), context=spawn
        )
        self._pool = self._new_pool()
        self._calls: set[Future[Any]] = set()

    async def step(self, name: str, scorer: Callable[..., float], *arguments: object) -> Step:
        """The last step of an episode, with `scorer(*arguments)` as the reward `name`: 0 without a value."""
        value, num_retries = await self._call(scorer, *arguments)
        return Step(rewards={name: value or 0.0}, num_retries=num_retries)

    async def call(self, function: Callable[..., T], *arguments: object) -> T | None:
        """Return `function(*arguments)`, a module-level function, or raise what it raises.

        None if the child exceeds a limit, or dies twice.
        """
        return (await self._call(function, *arguments))[0]

    async def _call(self, function: Callable[..., T], *arguments: object) -> tuple[T | None, int]:
        """The value, and how often the call was repeated."""
        for num_retries in (0, 1):
            try:
                return await self._once(function, *arguments), num_retries
            except (ProcessExpired, BrokenProcessPool) as error:
                code = getattr(error, "exitcode", None)
                problem = f"ended its process (exit code {code})"
                if code == -signal.SIGXCPU:
                    problem = f"took more than {self._seconds:g} s of processor time"
                elif not num_retries:
                    log.warning("%s %s and is called again", function.__name__, problem)
                    continue
            log.warning("%s %s and counts as 0", function.__name__, problem)
            break
        return None, num_retries

    async def _once(self, function: Callable[..., T], *arguments: object) -> T | None:
        given = self._seconds, function, *arguments
        try:
            call: Future[T] = self._pool.schedule(_limited, args=given, timeout=self._wall_seconds)
        except RuntimeError:  # the child died while it waited for a call
            self._replace_pool()
            call = self._pool.schedule(_limited, args=given, timeout=self._wall_seconds)
        pool, answer = self._pool, asyncio.wrap_future(call)
        self._calls.add(call)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            # A child that was stopped while it waited takes no call, and its pool does not end it.
            if pool is self._pool and not any(one.running() for one in self._calls):
                self._replace_pool()
            answer.cancel()
            raise
        except ScorerTimeout:
            log.warning("%s took more than %g s and counts as 0", function.__name__, self._wall_seconds)
            return None
        finally:
            self._calls.discard(call)

    def _replace_pool(self) -> None:
        old, self._pool = self._pool, self._new_pool()
        log.warning("the scoring process does not respond and is replaced")
        old.stop()
        threading.Thread(target=old.join, name="old scoring process", daemon=True).start()

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
