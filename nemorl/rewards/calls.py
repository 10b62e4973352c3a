"""Calls of code and servers that are not ours: so many at a time, each with a deadline of its own."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .deadline import Outcome, attempt

T = TypeVar("T")


@dataclass(frozen=True)
class Call(Generic[T]):
    """What came of a call, and when."""

    outcome: Outcome[T]
    seconds: float
    waited: float


class Calls:
    """The calls of one reward. Belongs to one event loop."""

    def __init__(self, stage: str, most: int, seconds: float) -> None:
        """`most` at a time, each for at most `seconds`; `stage` stands before what is said of failures."""
        self._stage = stage
        self._places = asyncio.Semaphore(most)
        self._seconds = seconds

    async def run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> Call[T]:
        """Call as soon as there is a place. The deadline begins then: who waits here is not slow."""
        asked = time.monotonic()
        async with self._places:
            started = time.monotonic()
            outcome = await attempt(call(), self._stage, self._seconds)
        return Call(outcome, time.monotonic() - started, started - asked)


async def in_thread(function: Callable[..., T], **arguments: Any) -> T:
    """Call a function in a thread of its own, so that a slow one holds up no other conversation.

    One that never returns is left behind when the wait is cancelled, and does not keep the process from
    ending. A pool's thread would: then every later call waits behind it.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = copy_context()

    def tell(value: Any, error: BaseException | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)

    def run() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = context.run(function, **arguments)
        except (SystemExit, StopIteration) as exit_:  # which end an event loop or a future without a word
            error = RuntimeError(f"it raised {type(exit_).__name__}({', '.join(map(repr, exit_.args))})")
            error.__cause__ = exit_
        except Exception as failure:  # noqa: BLE001  handed to who asked
            error = failure
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return await answer
