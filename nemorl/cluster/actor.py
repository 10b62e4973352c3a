"""The process that hosts a worker: an instance of any class, given by its import path.

The methods of a synchronous target run one at a time, always in the same thread, as collective operations
require. Its coroutine methods, and all methods of a concurrent target, run in the event loop. A method may be
one of an attribute of the target: `attribute.method`.
"""

import asyncio
import faulthandler
import importlib
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import ray

from .errors import ClusterError, NotShared, WorkerFailed
from .logs import send_output_to
from .placement import own_gpus


def references_in(tree: Any) -> list[ray.ObjectRef]:
    """All references in nested lists, tuples, dicts and dataclasses, each once, in order."""
    references: dict[ray.ObjectRef, None] = {}
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ray.ObjectRef):
            references[node] = None
        else:
            nodes.extend(reversed([child for _, child in _children(node)]))
    return list(references)


def with_values(tree: Any, values: Mapping[ray.ObjectRef, Any]) -> Any:
    """The same structure with every reference replaced by its value; the rest is kept as it is."""
    if isinstance(tree, ray.ObjectRef):
        return values[tree]
    replaced = {key: with_values(child, values) for key, child in _children(tree)}
    if all(replaced[key] is child for key, child in _children(tree)):
        return tree
    if isinstance(tree, dict):
        return replaced
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **replaced)
    return tuple(replaced.values()) if isinstance(tree, tuple) else list(replaced.values())


def _children(node: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and values of a container; nothing for a leaf."""
    if isinstance(node, dict):
        return node.items()
    if isinstance(node, list) or type(node) is tuple:
        return enumerate(node)
    if is_dataclass(node) and not isinstance(node, type):
        return [(f.name, getattr(node, f.name)) for f in fields(node) if f.init]
    return ()


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Group and rank of a worker, and the paths it uses."""

    group: str
    rank: int
    log: Path
    folder: Path  # the driver's working directory, to which paths of an experiment are relative


@dataclass(frozen=True)
class Invocation:
    """A method to run, and the stage it belongs to."""

    method: str  # of the target, or `attribute.method`
    stage: str
    deadline_seconds: float
    resolve: bool = False  # replace object references inside the arguments by their values
    background: bool = False  # run in a second thread, while other methods run
    keep: str = ""  # store the answer under this name until the next one, and return a reference to it


@runtime_checkable
class Closable(Protocol):
    """A target that releases something before its process ends; `close` may be a coroutine."""

    def close(self) -> Any:
        """Called once, after the last call."""
        ...


@runtime_checkable
class Startable(Protocol):
    """A concurrent target with a part that can only be started inside a coroutine."""

    async def start(self) -> None:
        """Called once, before the first call."""
        ...


class _Running:
    """One invocation while it runs. What it raises is logged and leaves as `WorkerFailed`."""

    def __init__(self, actor: "Actor", invocation: Invocation) -> None:
        self._actor, self._invocation = actor, invocation
        self.thread: int | None = None  # the one that runs this invocation

    def __enter__(self) -> "_Running":
        self._since = time.monotonic()
        self._actor.running.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._actor.running.remove(self)
        if not isinstance(error, Exception):
            return
        identity, stage = self._actor.identity, self._invocation.stage
        logger.error("%s failed in stage '%s'", self._invocation.method, stage, exc_info=error)
        if isinstance(error, ClusterError):  # a worker of another group is the cause, and the error names it
            return
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        raise WorkerFailed(identity.group, identity.rank, stage, name, str(error), identity.log) from error

    def __str__(self) -> str:
        seconds = time.monotonic() - self._since
        activity = f"in {self._invocation.method} for {seconds:.1f} s"
        frame = sys._current_frames().get(self.thread) if self.thread is not None else None
        if frame is None:
            return activity
        line = traceback.extract_stack(frame)[-1]
        return f"{activity}, at {line.filename}:{line.lineno} in {line.name}"


@ray.remote(concurrency_groups={"control": 1})
class Actor:
    """See the module."""

    def __init__(self, identity: Identity, *, concurrent: bool) -> None:
        self.identity = identity
        self.running: list[_Running] = []
        self._concurrent = concurrent
        self._target: Any = None
        self._kept: dict[str, ray.ObjectRef] = {}  # answers that other workers read
        self._unshared = [folder for folder in (identity.folder, identity.log.parent) if not folder.is_dir()]
        self._turn = asyncio.Lock()  # of the thread: first come, first served
        self._thread = ThreadPoolExecutor(1, "methods")
        self._background = ThreadPoolExecutor(1, "background")
        send_output_to(identity.log, identity.group, identity.rank)
        ray._private.worker._changeproctitle = lambda *_: nullcontext()  # by which each call is a new title

    async def make(self, invocation: Invocation, path: str, **kwargs: Any) -> tuple[str, ...]:
        """Import the class, make its instance where its methods will run, and start it if it can be.

        Returns the process's GPUs, as CUDA_VISIBLE_DEVICES names them.
        """
        ray._raylet.setproctitle(f"nemorl {self.identity.group} {self.identity.rank}")
        with _Running(self, invocation) as running:
            if self._concurrent:
                self._make_target(path, kwargs)
                if isinstance(self._target, Startable):
                    await self._target.start()
            else:
                await self._in_thread(self._thread, running, self._make_target, (path, kwargs), {})
        return own_gpus()

    async def call(self, invocation: Invocation, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the target."""
        with _Running(self, invocation) as running:
            method = attrgetter(invocation.method)(self._target)
            if self._concurrent or inspect.iscoroutinefunction(method):
                args, kwargs = await _resolved(invocation, args, kwargs)
                answer = method(*args, **kwargs)
                return await answer if inspect.isawaitable(answer) else answer
            if invocation.background:
                return await self._in_thread(self._background, running, method, args, kwargs)
            async with self._turn:
                args, kwargs = await _resolved(invocation, args, kwargs)
                answer = await self._in_thread(self._thread, running, method, args, kwargs)
            if not invocation.keep or answer is None:
                return answer
            self._kept[invocation.keep] = ray.put(answer)
            return self._kept[invocation.keep]

    async def stream(self, invocation: Invocation, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Run an async generator of the target and yield each item as it comes."""
        with _Running(self, invocation):
            args, kwargs = await _resolved(invocation, args, kwargs)
            async for item in attrgetter(invocation.method)(self._target)(*args, **kwargs):
                yield item

    async def close(self, invocation: Invocation) -> None:
        """Let the target release what it holds."""
        with _Running(self, invocation) as running:
            if not isinstance(self._target, Closable):
                return
            if self._concurrent or inspect.iscoroutinefunction(self._target.close):
                answer = self._target.close()
                if inspect.isawaitable(answer):
                    await answer
            else:
                await self._in_thread(self._thread, running, self._target.close, (), {})

    @ray.method(concurrency_group="control")
    async def describe_activity(self) -> str:
        """What runs now; the stacks of all threads go to the log. Answered from a thread of its own."""
        faulthandler.dump_traceback(file=2, all_threads=True)
        return "; ".join(map(str, self.running)) or "idle"

    def _make_target(self, path: str, kwargs: dict[str, Any]) -> None:
        if self._unshared:
            raise NotShared(
                f"{self.identity.group} rank {self.identity.rank} runs on {os.uname().nodename}, which has "
                f"no {' and no '.join(map(str, self._unshared))}: put the working directory and run_dir on a "
                "file system that all nodes share"
            )
        os.chdir(self.identity.folder)
        module, _, name = path.partition(":")
        self._target = getattr(importlib.import_module(module), name)(**kwargs)

    @staticmethod
    async def _in_thread(
        thread: ThreadPoolExecutor, running: _Running, method: Any, args: Any, kwargs: Any
    ) -> Any:
        def run() -> Any:
            running.thread = threading.get_ident()
            try:
                return method(*args, **kwargs)
            except StopIteration as error:  # which no future can hold
                raise RuntimeError("StopIteration was raised") from error

        return await asyncio.get_running_loop().run_in_executor(thread, run)


async def _resolved(invocation: Invocation, args: Any, kwargs: Any) -> Any:
    """The arguments, if the invocation says so with every reference inside them replaced by its value."""
    if not invocation.resolve:
        return args, kwargs
    references = references_in((args, kwargs))
    async with asyncio.timeout(invocation.deadline_seconds):
        values = await asyncio.gather(*references)
    return with_values((args, kwargs), dict(zip(references, values, strict=True)))
