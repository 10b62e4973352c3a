"""When Python's cyclic garbage collector runs: it looks through objects that stay again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS_PER_COLLECTION = 200_000  # by default 700


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, where millions of objects that stay are made, the collector does not run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Inside, the collector leaves out what exists already, and rarely passes over the rest.

    The summaries of a large step have no cycles and are as many objects as the program: by default each step
    would take several passes over both.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
