"""Scorers for the scoring process: module-level, so that the child can import them."""

import os
import time


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


def refuse() -> float:
    raise KeyError("no such entry")
