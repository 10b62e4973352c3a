"""A thread for the blocking calls of one environment."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class OwnThread:
    """Calls run in sequence in the same thread, as libraries with a state of the thread require.

    A call that hangs costs its own environment only, and does not keep the process from ending, as it does in
    a shared pool of threads. The thread starts with the first call.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: Thread | None = None

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="environment", daemon=True)
            self._thread.start()
        answer: Future[T] = Future()
        self._calls.put((answer, function, arguments))
        return await asyncio.wrap_future(answer)

    async def end(self, function: Callable[[], None]) -> None:
        """Call a function that releases what the environment holds, and end the thread."""
        try:
            await self.call(function)
        finally:
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            answer, function, arguments = call
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001  raised where the call is awaited
                answer.set_exception(error)
            del call, answer, function, arguments  # which the thread would keep while it waits
