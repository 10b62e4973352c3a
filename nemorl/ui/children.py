"""Child processes for the user's code, which may hang, exit or allocate without end: the server imports none.

A child is ended at the deadline of a call, and is replaced when a file changes that it has imported.
"""

import importlib
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as CallTimeout
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

T = TypeVar("T")
_CLOCK_NS = 20_000_000  # by which times of files may be behind
MEMORY_BYTES = 6 * 10**9  # of a child, beyond which it gets no more


class ChildError(Exception):
    """Why a call has no answer: a sentence about what the user's code did."""


class Child:
    """Calls functions of nemorl in one child process. A call waits for the one before it."""

    def __init__(self, folder: Path, seconds: float, memory_bytes: int = MEMORY_BYTES) -> None:
        """`folder` is that in which runs start, `seconds` the deadline of a call."""
        self._folder, self._seconds, self._memory_bytes = folder, seconds, memory_bytes
        self._pool: ProcessPool | None = None
        self._imported: dict[
            str, float
        ] = {}  # files of the user's modules in the child, and when they changed
        self._lock = threading.Lock()
        self._waiting = 0

    def call(self, function: Callable[..., T], *arguments: object, only_newest: bool = False) -> T | None:
        """Return `function(*arguments)` of a module-level function, or raise what it raises.

        With `only_newest` None if a later call waits already. Raises ChildError if the child is ended.
        """
        self._waiting += 1
        number = self._waiting
        with self._lock:
            if only_newest and number != self._waiting:
                return None
            return self._call(function, *arguments)

    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        if self._pool is not None and any(_changed(file) != at for file, at in self._imported.items()):
            self._end()
        if self._pool is None:
            # spawn: a fork would copy the locks of the server's threads in any state.
            spawn = multiprocessing.get_context("spawn")
            start = (str(self._folder), self._memory_bytes)
            self._pool = ProcessPool(1, initializer=_enter, initargs=start, context=spawn)
        try:
            future = self._pool.schedule(_answer, args=(function, *arguments), timeout=self._seconds)
            value, files = future.result()
        except CallTimeout as error:
            self._end()
            what = f"no answer within {self._seconds:g} s, and the process that ran the code was ended"
            raise ChildError(f"{what}; make it faster, or look for an endless loop") from error
        except (ProcessExpired, BrokenProcessPool) as error:
            self._end()
            code = getattr(error, "exitcode", None)
            what = f"the process that ran the code ended (exit code {code})"
            raise ChildError(f"{what}; it calls exit, crashed, or needs too much memory") from error
        except MemoryError as error:
            self._end()
            limit = f"{self._memory_bytes / 1e9:g} GB"
            raise ChildError(f"the code needs more than {limit} of memory; make it allocate less") from error
        # Of a file that was known before the call, so that a change during it is seen by the next one.
        self._imported = {file: self._imported.get(file, at) for file, at in files.items()}
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        pool, self._pool, self._imported = self._pool, None, {}
        if pool is not None:
            pool.stop()
            threading.Thread(target=pool.join, name="old child", daemon=True).start()


def _enter(folder: str, memory_bytes: int) -> None:
    """In the child: as of a command in this folder, without output, and with a limit of memory."""
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes if hard < 0 else min(memory_bytes, hard), hard))
    os.chdir(folder)
    sys.dont_write_bytecode = True  # which Python takes for current if a file changes within a second
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _answer(function: Callable[..., T], *arguments: object) -> tuple[T, dict[str, float]]:
    """In the child: the value, and files of the current folder that it has imported, with their changes.

    One that may have changed since it was imported has 0, which is no time of a file.
    """
    importlib.invalidate_caches()
    began = time.time_ns() - _CLOCK_NS
    value = function(*arguments)
    here = Path.cwd()
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    own = [file for file in files if file and Path(file).is_relative_to(here)]
    users = [file for file in own if "site-packages" not in file and not _is_ours(file)]
    return value, {file: at if (at := _changed(file)) < began else 0 for file in users}


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(Path(__file__).parents[1])


def _changed(file: str) -> float:
    """When a file was changed; 0 if it is gone."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


def call_once(function: Callable[..., T], *arguments: Any, folder: Path, seconds: float) -> T:
    """`function(*arguments)` in a child for this call alone. Raises what it raises, and ChildError."""
    child = Child(folder, seconds)
    try:
        value = child.call(function, *arguments)
        assert value is not None
        return value
    finally:
        child.close()
