"""A handle on one worker process. Handles can be given to other workers, which then call it themselves."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from .actor import Invocation
from .errors import DeadlineExceeded
from .nodes import Home
from .waiting import answers, told_error, whereabouts


@dataclass(frozen=True)
class Worker:
    """One process of a group."""

    group: str
    rank: int
    log: Path
    actor: Any  # Ray's handle of a SyncHost, an AsyncHost or a ServingHost
    entrance: str = "call"  # the actor's method by which methods are called
    home: Home | None = None  # in a run over several nodes

    def serving(self) -> "Worker":
        """The same process of a `ServingHost`, asked beside what runs in it."""
        return replace(self, entrance="ask")

    async def call_async(
        self,
        method: str,
        *args: Any,
        stage: str,
        deadline_seconds: float,
        resolve: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run a method on this worker alone.

        `resolve` replaces object references inside the arguments by their values. Raises `WorkerFailed`,
        `WorkerDied` or `DeadlineExceeded`; the worker is left as it is.
        """
        invocation = Invocation(method, stage, deadline_seconds, resolve)
        reference = getattr(self.actor, self.entrance).remote(invocation, *args, **kwargs)
        return (await answers({reference: self}, stage, deadline_seconds))[0]

    async def stream(
        self,
        method: str,
        *args: Any,
        stage: str,
        deadline_seconds: float,
        resolve: bool = False,
        pairs: bool = False,
        **kwargs: Any,
    ) -> AsyncGenerator[Any, None]:
        """Items of an async generator of the worker as they come; `deadline_seconds` is for all of them.

        With `pairs` its items are taken two by two: the first, which may be large, stays where it is and
        comes as a reference that this process owns, the second comes as it is.
        The worker has to be asynchronous. Raises like `call_async`. A consumer that leaves early should close
        the iterator (`contextlib.aclosing`): this cancels the generator in the worker.
        """
        invocation = Invocation(method, stage, deadline_seconds, resolve)
        items = self.actor.stream.options(num_returns="streaming").remote(invocation, *args, **kwargs)
        end = time.monotonic() + deadline_seconds
        running = True
        try:
            while True:
                async with asyncio.timeout(end - time.monotonic()):
                    item = await (_next_pair(items) if pairs else _next(items))
                yield item
        except StopAsyncIteration:
            running = False
        except ray.exceptions.RayError as error:
            running = False
            raise await told_error(self, stage, error) from None
        except TimeoutError:
            where = await whereabouts([self])
            raise DeadlineExceeded(self.group, (self.rank,), stage, deadline_seconds, where) from None
        finally:
            if running:
                ray.cancel(items)


async def _next(items: Any) -> Any:
    return await (await anext(items))


async def _next_pair(items: Any) -> tuple[Any, Any]:
    reference = await anext(items)
    try:
        return reference, await _next(items)
    except StopAsyncIteration:
        await reference  # a generator that fails ends with its error as the last item
        raise
