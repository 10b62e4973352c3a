"""A few processes that take one function after another, so that their seconds of imports are spent once."""

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SECONDS = 240  # of one call, start included


class Pool:
    """`run` calls a function on the first ranks, each with its rank, their number and a fresh rendezvous."""

    def __init__(self, size: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results by rank; an error on any rank is raised with that rank's traceback."""
        self._calls += 1
        rendezvous = f"file://{Path(self._folder.name) / str(self._calls)}"
        pipes = self._pipes[:world_size]
        for rank, pipe in enumerate(pipes):
            pipe.send((self._calls, function, (rank, world_size, rendezvous, *args)))
        answers = [self._answer(rank, pipe) for rank, pipe in enumerate(pipes)]
        errors = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        assert not errors, "\n".join(errors)
        return [result for _, result in answers]

    def _answer(self, rank: int, pipe: Connection) -> tuple[str | None, Any]:
        """The error or the result of this call; answers of calls that were given up are passed over."""
        number = None
        while number != self._calls:
            assert pipe.poll(SECONDS), f"rank {rank} gave no answer in {SECONDS} s"
            number, error, result = pipe.recv()
        return error, result

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


@contextmanager
def pool_with(stand_in: Path) -> Iterator[Pool]:
    """A process of its own with a library's stand-in, since Megatron looks for libraries at its import."""
    sys.path.insert(0, str(stand_in))
    try:
        pool = Pool(1)
    finally:
        sys.path.remove(str(stand_in))
    yield pool
    pool.close()


def _serve(pipe: Connection) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}  # as policy processes have them
    while True:
        try:
            number, function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((number, None, function(*args)))
        except Exception:  # noqa: BLE001 - whatever it was, the test has to see it
            pipe.send((number, traceback.format_exc(), None))
            _leave_group()
        # A worker that is gone hangs in reference cycles, and with it some fifty threads of gloo.
        gc.collect()


def _leave_group() -> None:
    """So that the next function can join another one."""
    from nemorl.megatron import parallel  # not before the process has started: it imports torch

    parallel.leave()
