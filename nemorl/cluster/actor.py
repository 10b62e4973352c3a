"""The process that hosts a worker: an instance of any class, given by its import path.

The methods of a synchronous target run one at a time, always in the same thread, as collective operations
require. Its coroutine methods, and all methods of a concurrent target, run in the event loop.
"""

import asyncio
import faulthandler
import gc
import importlib
import inspect
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ObjectLostError

from .activity import Activity, Call, ServiceCalls, collectives, place_of, stacks
from .errors import ClusterError, NotShared, ObjectsLost, WorkerFailed
from .logs import send_output_to

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Identity:
    group: str
    rank: int
    log: Path
    folder: Path  # the driver's working directory, to which paths of an experiment are relative


@dataclass(frozen=True)
class Invocation:
    method: str  # of the target, or `attribute.method`
    stage: str
    deadline_seconds: float
    resolve: bool = False  # replace object references inside the arguments by their values
    background: bool = False  # run in a second thread, while other methods run
    keep: str = ""  # store the answer under this name until the next one, and return a reference to it


@dataclass(frozen=True)
class TableEntries:
    """Some references of a list in the object store, which has each once for all ranks."""

    table: ray.ObjectRef
    numbers: tuple[int, ...]


@dataclass(eq=False)
class _Running:
    method: str
    thread: str = ""  # name of the thread that runs it; empty: it waits for its turn, or is a coroutine
    since: float = field(default_factory=time.monotonic)


@ray.remote(concurrency_groups={"control": 1})
class Actor:
    def __init__(self, identity: Identity, *, concurrent: bool) -> None:
        self._identity = identity
        self._concurrent = concurrent
        self._running: list[_Running] = []
        self._finished, self._idle_since = "", time.monotonic()  # the method that ended last, and when
        self._loop: asyncio.AbstractEventLoop | None = None  # that runs the coroutines of the target
        self._target: Any = self  # until it is constructed
        self._kept: dict[str, ray.ObjectRef] = {}  # answers that other workers read
        self._unshared = [folder for folder in (identity.folder, identity.log.parent) if not folder.is_dir()]
        self._turn = asyncio.Lock()  # of the thread: first come, first served
        self._threads = {name: ThreadPoolExecutor(1, name) for name in ("methods", "background")}
        send_output_to(identity.log, identity.group, identity.rank)
        ray._private.worker._changeproctitle = lambda *_: nullcontext()  # by which each call is a new title

    async def make(self, invocation: Invocation, path: str, **kwargs: Any) -> tuple[str, ...]:
        """Make the target and start it; return the process's GPUs, as CUDA_VISIBLE_DEVICES names them."""
        ray._raylet.setproctitle(f"nemorl {self._identity.group} {self._identity.rank}")
        self._loop = asyncio.get_running_loop()
        self._target = await self.call(replace(invocation, method="construct"), path, kwargs)
        if self._concurrent and hasattr(self._target, "start"):  # which requires a running event loop
            await self.call(replace(invocation, method="start"))
        return tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])

    def construct(self, path: str, kwargs: dict[str, Any]) -> Any:
        if self._unshared:
            name, missing = f"{self._identity.group} rank {self._identity.rank}", map(str, self._unshared)
            problem = f"{name} runs on {os.uname().nodename}, which has no {' and no '.join(missing)}"
            fix = "put the working directory and run_dir on a file system that all nodes share"
            raise NotShared(f"{problem}: {fix}")
        os.chdir(self._identity.folder)
        module, _, name = path.partition(":")
        gc.disable()  # it would look again and again through thousands of modules, which stay
        try:
            target = getattr(importlib.import_module(module), name)
        finally:
            gc.enable()
        gc.freeze()
        return target(**kwargs)

    async def call(self, invocation: Invocation, *args: Any, **kwargs: Any) -> Any:
        with self._reporting(invocation) as running:
            method = attrgetter(invocation.method)(self._target)
            in_loop = self._concurrent or inspect.iscoroutinefunction(method)
            async with nullcontext() if in_loop or invocation.background else self._turn:
                if invocation.resolve:
                    async with asyncio.timeout(invocation.deadline_seconds):
                        args, kwargs = await _resolved(await with_references((args, kwargs)))
                if in_loop:
                    answer = method(*args, **kwargs)
                    return await answer if inspect.isawaitable(answer) else answer
                thread = "background" if invocation.background else "methods"
                running.thread = f"{thread}_0"  # as its executor names it
                # A future of asyncio could not hold a StopIteration.
                future, done = self._threads[thread].submit(method, *args, **kwargs), asyncio.Event()
                wake = asyncio.get_running_loop().call_soon_threadsafe
                future.add_done_callback(lambda _: wake(done.set))
                await done.wait()
                answer = future.result()
            if not invocation.keep or answer is None:
                return answer
            self._kept[invocation.keep] = ray.put(answer)
            return self._kept[invocation.keep]

    @ray.method(num_returns=2, enable_task_events=False)  # which take a good part of a short call's time
    async def call_pair(self, call: tuple[Invocation, Sequence[Any]]) -> tuple[Any, Any]:
        """Of a method that returns two values, each as an object of its own; `call` has its arguments."""
        invocation, args = call
        first, second = await self.call(invocation, *args)
        return first, second

    async def stream(self, invocation: Invocation, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        with self._reporting(invocation):
            async for item in attrgetter(invocation.method)(self._target)(*args, **kwargs):
                yield item

    async def wait_forever(self) -> None:
        """Ends with the process, by which a caller notices that at once."""
        await asyncio.Event().wait()

    async def close(self, invocation: Invocation) -> None:
        if self._target is not self and hasattr(self._target, "close"):
            await self.call(invocation)

    @ray.method(concurrency_group="control")
    async def respond(self) -> None:
        """Show that the process runs, whatever its other threads do."""

    @ray.method(concurrency_group="control")
    async def describe_activity(self) -> Activity:
        """Describe what runs here, from a thread of its own; the stacks of all threads go to the log."""
        faulthandler.dump_traceback(file=2, all_threads=True)
        now, queues, services = time.monotonic(), {}, []
        if hasattr(self._target, "queues"):
            with suppress(Exception):  # an engine that has failed has none
                queues = self._target.queues()
        if hasattr(self._target, "service_calls"):
            services = [ServiceCalls(*waiting) for waiting in self._target.service_calls()]
        calls = [Call(one.method, now - one.since, place_of(one.thread)) for one in tuple(self._running)]
        idle = now - self._idle_since
        of_loop = stacks(self._loop)
        return Activity(tuple(calls), self._finished, idle, collectives(), queues, tuple(services), of_loop)

    @contextmanager
    def _reporting(self, invocation: Invocation) -> Iterator[_Running]:
        """Log what the invocation raises inside, and raise it as `WorkerFailed`."""
        running = _Running(invocation.method)
        self._running.append(running)
        try:
            yield running
        except Exception as error:
            logger.exception("%s failed in stage '%s'", invocation.method, invocation.stage)
            if isinstance(error, ClusterError):  # the error names its cause, a worker of another group
                raise
            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            group, rank, log = self._identity.group, self._identity.rank, self._identity.log
            failure = ObjectsLost if isinstance(error, ObjectLostError) else WorkerFailed
            raise failure(group, rank, invocation.stage, kind, str(error), log) from error
        finally:
            self._running.remove(running)
            self._finished, self._idle_since = invocation.method, time.monotonic()


async def with_references(tree: Any) -> Any:
    """Nested lists, tuples, dicts and dataclasses with references in place of entries."""
    tables: dict[ray.ObjectRef, list[ray.ObjectRef]] = {}
    _mapped(tree, TableEntries, lambda part: tables.setdefault(part.table, []))
    for table in tables:
        tables[table] = await table
    return _mapped(
        tree, TableEntries, lambda part: tuple(tables[part.table][number] for number in part.numbers)
    )


async def _resolved(tree: Any) -> Any:
    references: dict[ray.ObjectRef, ray.ObjectRef] = {}
    _mapped(tree, ray.ObjectRef, lambda reference: references.setdefault(reference, reference))
    values = await asyncio.gather(*references)
    return _mapped(tree, ray.ObjectRef, dict(zip(references, values, strict=True)).__getitem__)


def _mapped(tree: Any, kind: type[T], value_of: Callable[[T], Any]) -> Any:
    """Nested lists, tuples, dicts and dataclasses with everything of one kind replaced."""
    if isinstance(tree, kind):
        return value_of(tree)
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list) or type(tree) is tuple:
        children = enumerate(tree)
    elif is_dataclass(tree) and not isinstance(tree, type):
        children = [(f.name, getattr(tree, f.name)) for f in fields(tree) if f.init]
    changed = {
        key: value for key, child in children if (value := _mapped(child, kind, value_of)) is not child
    }
    if not changed:
        return tree
    if isinstance(tree, dict):
        return tree | changed
    if is_dataclass(tree):
        return replace(tree, **changed)  # type: ignore[type-var]
    return type(tree)(changed.get(index, child) for index, child in enumerate(tree))
