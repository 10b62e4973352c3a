"""Light classes that the tests host in workers, named by their import path."""

import asyncio
import ctypes
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import ray

# Read while the module is imported, as numerical libraries do.
THREADS_AT_IMPORT = os.environ.get("OMP_NUM_THREADS")


class NeedsTwo(Exception):
    """Cannot be unpickled: it requires two arguments and hands one on."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Recorder:
    """A synchronous worker that remembers its calls and knows several ways to fail."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[str] = []
        self.words: queue.Queue[str] = queue.Queue()

    def record(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        self.calls.append("record")
        return self.rank, args, kwargs

    def history(self) -> list[str]:
        return self.calls

    def process(self) -> int:
        return os.getpid()

    def niceness(self) -> int:
        return os.nice(0)

    def large_pair(self) -> tuple[bytes, int]:
        """The first is not kept by the caller, as small values are."""
        return b"0" * 2**20, self.rank

    def gpus(self) -> tuple[str, ...]:
        return tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def thread(self) -> int:
        return threading.get_ident()

    def threads_at_import(self) -> str | None:
        return THREADS_AT_IMPORT

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        sys.stdout.write(f"printed {text}\n")
        sys.stderr.write(f"error stream {text}\n")
        logging.getLogger("nemorl.target").info("logged %s", text)
        logging.getLogger("a.library").info("a library's note")
        os.write(1, f"native {text}\n".encode())

    def wait_for_word(self) -> str:
        return self.words.get(timeout=30)

    def give_word(self, word: str) -> None:
        self.words.put(word)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        sys.stdout.write("woke up\n")

    def compute(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def fail_on(self, rank: int, message: str, others_sleep: float) -> None:
        if self.rank == rank:
            raise ValueError(message)
        self.sleep(others_sleep)

    def fail_unpicklable(self) -> None:
        raise NeedsTwo("one", "two")

    def lose_peer(self, rank: int) -> None:
        """The given rank dies; the others notice before Ray does, as a collective operation would."""
        if self.rank == rank:
            time.sleep(0.5)
            os._exit(7)
        raise ConnectionResetError("connection closed by peer")

    def segfault(self) -> None:
        ctypes.string_at(0)

    def close(self) -> None:
        sys.stdout.write("closed\n")


class Unmakable:
    """Cannot be made."""

    def __init__(self) -> None:
        raise ValueError("no disk")


class Streamer:
    """An asynchronous worker."""

    def __init__(self) -> None:
        self.cut_short = 0
        self.begun = 0
        self.gathered = 0

    async def double(self, value: int) -> int:
        await asyncio.sleep(0.01)
        return 2 * value

    def plain(self, value: int) -> int:
        return value + 1

    async def total(self, numbers: dict[str, list[int]]) -> int:
        return sum(sum(part) for part in numbers.values())

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def exit_process(self, code: int) -> None:
        sys.stdout.write("about to die\n")
        os._exit(code)

    async def count(self, items: int, pause: float) -> AsyncIterator[int]:
        finished = False
        try:
            for i in range(items):
                yield i
                await asyncio.sleep(pause)
            finished = True
        finally:  # cancelled while it slept, or closed at its `yield`
            self.cut_short += not finished

    async def meet(self, others: int) -> AsyncIterator[int]:
        """Its one item comes when that number of these streams have begun."""
        self.begun += 1
        while self.begun < others:
            await asyncio.sleep(0.01)
        yield self.begun

    async def gather(self, others: int) -> int:
        """Returns when that number of these calls have begun."""
        self.gathered += 1
        while self.gathered < others:
            await asyncio.sleep(0.01)
        return self.gathered

    async def count_then_fail(self, items: int) -> AsyncIterator[int]:
        for i in range(items):
            yield i
        raise RuntimeError("the stream broke")

    async def count_then_die(self, items: int) -> AsyncIterator[int]:
        for i in range(items):
            yield i
        await asyncio.sleep(0.5)
        sys.stdout.write("about to die\n")
        os._exit(3)

    async def pair(self, seconds: float) -> tuple[list[float], float]:
        """Fails for a negative number."""
        finished = seconds < 0
        try:
            if finished:
                raise ValueError("too early")
            await asyncio.sleep(seconds)
            finished = True
        finally:
            self.cut_short += not finished
        return [seconds] * 3, seconds

    async def times_cut_short(self) -> int:
        return self.cut_short

    async def process(self) -> int:
        return os.getpid()

    async def ask(self, other: Any, value: int) -> int:
        """Call another worker through its handle."""
        answer: int = await other.call("double", value, stage="asking", seconds=30.0)
        return answer

    async def ask_the_dying(self, other: Any) -> None:
        await other.call("exit_process", 5, stage="asking", seconds=30.0)

    async def close(self) -> None:
        sys.stdout.write("closed\n")


class Blocker:
    """A worker with a method that runs until it is released from elsewhere."""

    def __init__(self) -> None:
        self._released = threading.Event()

    def block(self) -> int:
        assert self._released.wait(20)
        return threading.get_ident()

    async def release(self) -> None:
        self._released.set()

    async def loop_thread(self) -> int:
        return threading.get_ident()

    def thread(self) -> int:
        return threading.get_ident()

    async def count(self, items: int) -> AsyncIterator[int]:
        for item in range(items):
            yield item
