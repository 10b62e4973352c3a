"""Functions that run in a process of their own: what installs the pretended device changes torch for good."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")


def alone(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a function of a module of the tests."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    context = get_context("forkserver")
    context.set_forkserver_preload(["nemorl.rehearsal.worker"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return pool.submit(function, *arguments).result()
