"""Waiting for code that is not ours: never longer than a deadline, and its failure is a value."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of a call: a value, or a sentence saying why there is none."""

    value: T | None = None
    failure: str | None = None


async def attempt(call: Coroutine[Any, Any, T], stage: str, seconds: float) -> Outcome[T]:
    """Await `call` for at most `seconds`; an exception or the deadline becomes a failure naming `stage`.

    A call that also ignores its cancellation is left behind: asyncio.wait_for would wait for it.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()  # nothing when it is done; needed when it hangs or when this wait itself is cancelled
    if not done:
        return Outcome(failure=f"{stage}: no answer within {seconds:g} s")
    if task.cancelled():
        return Outcome(failure=f"{stage}: cancelled itself")
    error = task.exception()
    if error is not None:
        return Outcome(failure=f"{stage}: {type(error).__name__}: {error}")
    return Outcome(value=task.result())
