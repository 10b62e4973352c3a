"""A Ray of our own: its processes out of our process group, and ended where it does not come up."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray._private import services

from .errors import ClusterUnavailable

logger = logging.getLogger(__name__)

TRIES = 2


def start_apart(deadline_seconds: float, **options: Any) -> None:
    """`ray.init(**options)`, tried once more where Ray did not come up in its own time, 30 s.

    Ray's processes get process groups of their own: a signal to our whole group, as `timeout`, schedulers and
    containers send SIGTERM, would else end Ray before us, and we could end nothing in order. The kernel ends
    them with us all the same. After `deadline_seconds` no new try begins. Raises `ClusterUnavailable`.
    """
    began = time.monotonic()
    for attempt in range(1, TRIES + 1):
        with _apart() as processes:
            try:
                ray.init(**options)
                return
            except Exception as error:  # Ray raises the bare class where it is late
                ray.shutdown()
                _end(processes)
                if not _late(error):
                    raise ClusterUnavailable(f"Ray does not start: {' '.join(str(error).split())}") from error
                seconds = time.monotonic() - began
                if attempt == TRIES or seconds >= deadline_seconds:
                    raise ClusterUnavailable(_too_slow(attempt, seconds, deadline_seconds)) from error
        logger.warning("Ray did not come up in %.0f s (try %d of %d); trying again", seconds, attempt, TRIES)


@contextmanager
def _apart() -> Iterator[list[subprocess.Popen[bytes]]]:
    """What Ray starts in the block, each in a process group of its own that its children share."""
    started: list[subprocess.Popen[bytes]] = []
    popen = services.ConsolePopen

    class Apart(popen):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, process_group=0, **options)
            started.append(self)

    services.ConsolePopen = Apart
    try:
        yield started
    finally:
        services.ConsolePopen = popen


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _late(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or "timed out" in str(error)


def _too_slow(tries: int, seconds: float, deadline_seconds: float) -> str:
    times = "once" if tries == 1 else f"{tries} times"
    return (
        f"Ray did not come up in stage 'start': tried {times} in {seconds:.0f} s (cluster.deadlines.start = "
        f"{deadline_seconds:g}), with a load of {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores. Start "
        "again when the machine is less busy, or raise cluster.deadlines.start where it ended the tries."
    )
