"""The processes that host workers: any class by its import path, run synchronously or in an event loop.

Object references inside arguments: found, and replaced by what they refer to.
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
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import ray

from .errors import ClusterError, NotShared, WorkerFailed
from .logs import send_output_to


def references_in(tree: Any) -> list[ray.ObjectRef]:
    """All references in nested lists, tuples, dicts and dataclasses, each once, in order."""
    found: dict[ray.ObjectRef, None] = {}
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ray.ObjectRef):
            found[node] = None
        else:
            waiting.extend(reversed([child for _, child in _children(node)]))
    return list(found)


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
    """Keys and parts of what can hold references; nothing for a leaf."""
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
    """Who a worker is."""

    group: str
    rank: int
    log: Path
    folder: Path  # the driver's working directory, to which paths of an experiment are relative


@dataclass(frozen=True)
class Invocation:
    """What a worker shall do, and what for."""

    method: str
    stage: str
    deadline_seconds: float
    resolve: bool = False  # replace object references inside the arguments by their values


@runtime_checkable
class Closable(Protocol):
    """A worker that wants to release something before its process ends; `close` may be a coroutine."""

    def close(self) -> Any:
        """Called once, after the last call."""
        ...


@runtime_checkable
class Startable(Protocol):
    """A worker in an event loop of which some part can only be started inside a coroutine."""

    async def start(self) -> None:
        """Called once, before the first call."""
        ...


class _Running:
    """One invocation while it runs. What it raises is logged and leaves as `WorkerFailed`."""

    def __init__(self, host: "_Host", invocation: Invocation) -> None:
        self._host, self._invocation = host, invocation

    def __enter__(self) -> None:
        self._since, self._thread = time.monotonic(), threading.get_ident()
        self._host.running.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._host.running.remove(self)
        if not isinstance(error, Exception):
            return
        who, stage = self._host.identity, self._invocation.stage
        logger.error("%s failed in stage '%s'", self._invocation.method, stage, exc_info=error)
        if isinstance(error, ClusterError):  # a worker of another group is the cause, and the error names it
            return
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        raise WorkerFailed(who.group, who.rank, stage, name, str(error), who.log) from error

    def __str__(self) -> str:
        seconds = time.monotonic() - self._since
        doing = f"in {self._invocation.method} for {seconds:.1f} s"
        frame = sys._current_frames().get(self._thread)
        if self._host.concurrent or frame is None:
            return doing
        place = traceback.extract_stack(frame)[-1]
        return f"{doing}, at {place.filename}:{place.lineno} in {place.name}"


class _Host:
    """What both kinds of host share."""

    concurrent = False  # whether invocations share one thread, whose stack then tells nothing of each

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.running: list[_Running] = []
        self.target: Any = None
        self._unshared = [folder for folder in (identity.folder, identity.log.parent) if not folder.is_dir()]
        send_output_to(identity.log, identity.group, identity.rank)

    def _make_target(self, path: str, kwargs: dict[str, Any]) -> None:
        if self._unshared:
            raise NotShared(
                f"{self.identity.group} rank {self.identity.rank} runs on {os.uname().nodename}, where there "
                f"is no {' and no '.join(map(str, self._unshared))}: the working directory and run_dir have "
                "to be on a file system that all nodes share"
            )
        os.chdir(self.identity.folder)
        module, _, name = path.partition(":")
        self.target = getattr(importlib.import_module(module), name)(**kwargs)

    def _describe_activity(self) -> str:
        """What this process is doing now; the stacks of all its threads go to its log."""
        faulthandler.dump_traceback(file=2, all_threads=True)
        return "; ".join(map(str, self.running)) or "idle"


@ray.remote(concurrency_groups={"control": 1, "beside": 1})
class SyncHost(_Host):
    """Runs one method at a time, always in the same thread, as collective operations want it.

    Another thread runs, one at a time too, what is called beside: work that is not collective and long.
    """

    def make(self, invocation: Invocation, path: str, **kwargs: Any) -> None:
        """Import the class and make its instance."""
        with _Running(self, invocation):
            self._make_target(path, kwargs)

    def call(self, invocation: Invocation, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the hosted instance."""
        with _Running(self, invocation):
            if invocation.resolve:
                args, kwargs = _resolved(args, kwargs, invocation.deadline_seconds)
            return getattr(self.target, invocation.method)(*args, **kwargs)

    @ray.method(concurrency_group="beside")
    def call_background(self, invocation: Invocation, *args: Any) -> Any:
        """Run a method of the hosted instance while other calls go on."""
        with _Running(self, invocation):
            return getattr(self.target, invocation.method)(*args)

    def close(self, invocation: Invocation) -> None:
        """Let the hosted instance release what it holds."""
        with _Running(self, invocation):
            if isinstance(self.target, Closable):
                self.target.close()

    @ray.method(concurrency_group="control")
    def describe_activity(self) -> str:
        """What this process is doing now; answered while a method runs."""
        return self._describe_activity()


@ray.remote(concurrency_groups={"control": 1})
class AsyncHost(_Host):
    """Runs methods concurrently in one event loop; plain methods block that loop while they run."""

    concurrent = True

    async def make(self, invocation: Invocation, path: str, **kwargs: Any) -> None:
        """Import the class, make its instance inside the event loop, and start it if it is to be started."""
        with _Running(self, invocation):
            self._make_target(path, kwargs)
            if isinstance(self.target, Startable):
                await self.target.start()

    async def call(self, invocation: Invocation, *args: Any, **kwargs: Any) -> Any:
        """Run a plain or an async method of the hosted instance."""
        with _Running(self, invocation):
            if invocation.resolve:
                args, kwargs = await _awaited(args, kwargs, invocation.deadline_seconds)
            answer = getattr(self.target, invocation.method)(*args, **kwargs)
            return await answer if inspect.isawaitable(answer) else answer

    async def stream(self, invocation: Invocation, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Run an async generator of the hosted instance and hand out each item as it comes."""
        with _Running(self, invocation):
            if invocation.resolve:
                args, kwargs = await _awaited(args, kwargs, invocation.deadline_seconds)
            async for item in getattr(self.target, invocation.method)(*args, **kwargs):
                yield item

    async def close(self, invocation: Invocation) -> None:
        """Let the hosted instance release what it holds."""
        with _Running(self, invocation):
            if isinstance(self.target, Closable):
                answer = self.target.close()
                if inspect.isawaitable(answer):
                    await answer

    @ray.method(concurrency_group="control")
    async def describe_activity(self) -> str:
        """What this process is doing now; answered from another thread than the methods'."""
        return self._describe_activity()


@ray.remote(concurrency_groups={"control": 1, "beside": 1, "serving": 1000})
class ServingHost(_Host):
    """A `SyncHost` that serves: what it is asked beside its methods runs in another thread's event loop."""

    async def make(self, invocation: Invocation, path: str, **kwargs: Any) -> None:
        """Import the class and make its instance."""
        with _Running(self, invocation):
            self._make_target(path, kwargs)

    async def call(self, invocation: Invocation, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the hosted instance: one at a time, since it blocks this thread's event loop."""
        with _Running(self, invocation):
            if invocation.resolve:
                args, kwargs = await _awaited(args, kwargs, invocation.deadline_seconds)
            return getattr(self.target, invocation.method)(*args, **kwargs)

    @ray.method(concurrency_group="beside")
    async def call_background(self, invocation: Invocation, *args: Any) -> Any:
        """Run a method of the hosted instance while other calls go on."""
        with _Running(self, invocation):
            return getattr(self.target, invocation.method)(*args)

    @ray.method(concurrency_group="serving")
    async def ask(self, invocation: Invocation, *args: Any, **kwargs: Any) -> Any:
        """Run a quick or an async method of the hosted instance while other calls go on."""
        with _Running(self, invocation):
            answer = getattr(self.target, invocation.method)(*args, **kwargs)
            return await answer if inspect.isawaitable(answer) else answer

    @ray.method(concurrency_group="serving")
    async def stream(self, invocation: Invocation, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Run an async generator of the hosted instance and hand out each item as it comes."""
        with _Running(self, invocation):
            async for item in getattr(self.target, invocation.method)(*args, **kwargs):
                yield item

    async def close(self, invocation: Invocation) -> None:
        """Let the hosted instance release what it holds."""
        with _Running(self, invocation):
            if isinstance(self.target, Closable):
                self.target.close()

    @ray.method(concurrency_group="control")
    async def describe_activity(self) -> str:
        """What this process is doing now; answered while a method runs."""
        return self._describe_activity()


def _resolved(args: Any, kwargs: Any, seconds: float) -> tuple[Any, Any]:
    """The arguments with every object reference inside them replaced by its value."""
    references = references_in((args, kwargs))
    values = ray.get(references, timeout=seconds)
    resolved: tuple[Any, Any] = with_values((args, kwargs), dict(zip(references, values, strict=True)))
    return resolved


async def _awaited(args: Any, kwargs: Any, seconds: float) -> Any:
    """The same in an event loop, which goes on meanwhile."""
    references = references_in((args, kwargs))
    async with asyncio.timeout(seconds):
        values = await asyncio.gather(*references)
    return with_values((args, kwargs), dict(zip(references, values, strict=True)))
