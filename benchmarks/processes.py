"""Sides of a benchmark, each in a process of its own, that take turns."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any


class Processes:
    """One process for each side that is asked for, as long as `stack`."""

    def __init__(self, start: Callable[[str], Callable[..., Any]], stack: ExitStack) -> None:
        """`start`, a function of a module, makes a side by its name in the side's process: a callable."""
        self._start = start
        self._stack = stack
        self._ends: dict[str, Connection[Any, Any]] = {}

    def call(self, side: str, *arguments: Any) -> Any:
        """What a side returns for the arguments; all others wait. Raises RuntimeError if it died."""
        if side not in self._ends:
            self._ends[side] = self._stack.enter_context(_process(side, self._start))
        try:
            self._ends[side].send(arguments)
            return self._ends[side].recv()
        except (EOFError, BrokenPipeError):
            raise RuntimeError(f"the process of {side} ended; its error is above") from None


@contextmanager
def _process(side: str, start: Callable[[str], Callable[..., Any]]) -> Iterator["Connection[Any, Any]"]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    # No daemon: an engine may have processes of its own.
    process = context.Process(target=_serve, args=(there, side, start), name=side)
    process.start()
    there.close()  # a process that died then ends the wait for it with EOFError
    try:
        yield here
    finally:
        here.close()
        process.join(timeout=30)
        process.kill()


def _serve(end: "Connection[Any, Any]", name: str, start: Callable[[str], Callable[..., Any]]) -> None:
    run = start(name)
    while True:
        try:
            arguments = end.recv()
        except EOFError:
            break
        end.send(run(*arguments))
    if close := getattr(run, "close", None):
        close()
