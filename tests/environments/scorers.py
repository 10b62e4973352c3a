"""Scorers for the scoring process: module-level, so that the child can import them."""

import os
import signal
import time
from pathlib import Path


def length(text: str) -> float:
    return float(len(text))


def pid() -> float:
    return float(os.getpid())


def hang() -> float:
    time.sleep(60)
    return 1.0


def spin() -> float:
    while True:
        pass


def die() -> float:
    os._exit(3)


def length_after_a_kill(text: str, marker: str) -> float:
    """Killed when it is called for the first time."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return length(text)


def refuse() -> float:
    raise KeyError("no such entry")
