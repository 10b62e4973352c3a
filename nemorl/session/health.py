"""Whether engines answer and get on with their work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nemorl.cluster.errors import ClusterError, DeadlineExceeded, WorkerFailed
from nemorl.cluster.group import Worker, WorkerGroup
from nemorl.config.run import DeadlineConfig
from nemorl.generation.types import EngineFailed, EngineHealth

_ENGINE_FAILED = f"{EngineFailed.__module__}.{EngineFailed.__qualname__}"


def hanging(health: EngineHealth, step_seconds: float) -> str | None:
    """Why an engine that answers is lost nevertheless; None if it is not."""
    at_work = health.running + health.waiting > 0 and not health.paused
    if not at_work or health.seconds_since_step <= step_seconds:
        return None
    return (
        f"no step for {health.seconds_since_step:.0f} s, while {health.running} sequences run and "
        f"{health.waiting} wait (cluster.deadlines.engine_step is {step_seconds:g})"
    )


class HealthChecks:
    """Asks the engines of a group how they are. Belongs to one event loop."""

    def __init__(self, group: WorkerGroup, deadlines: DeadlineConfig) -> None:
        self._group = group
        self._deadlines = deadlines
        self._ended: dict[int, str] = {}  # ranks whose processes were ended here, with the cause

    async def cause_of_loss(self, worker: Worker) -> str | None:
        """Why this engine is lost; None if it is not."""
        if worker.rank in self._ended:
            return self._ended[worker.rank]
        try:
            health = await self._ask(worker)
        except WorkerFailed as error:
            return error.message if error.kind == _ENGINE_FAILED else str(error)
        except ClusterError as error:
            return str(error)
        return hanging(health, self._deadlines.engine_step)

    def take_cause(self, worker: Worker, otherwise: str) -> str:
        """Why the process was ended, if it was here; its rank may then be started again."""
        return self._ended.pop(worker.rank, otherwise)

    @asynccontextmanager
    async def silent_ended(self) -> AsyncIterator[None]:
        """Inside, the process of an engine that does not answer is ended, so that what waits for it fails.

        It stays in the group, of which a call may be under way.
        """

        async def end_silent() -> None:
            while True:
                await asyncio.sleep(self._deadlines.health)
                await asyncio.gather(*map(self._end_if_silent, self._group.workers))

        watch = asyncio.create_task(end_silent())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _end_if_silent(self, worker: Worker) -> None:
        if worker.rank in self._ended:
            return
        try:
            await self._ask(worker)
        except DeadlineExceeded as error:
            self._ended[worker.rank] = str(error)
            self._group.kill(worker)
        except ClusterError:  # it does answer, or the call will tell of its death
            return

    async def _ask(self, worker: Worker) -> EngineHealth:
        health: EngineHealth = await worker.call_async(
            "health", stage="health check", deadline_seconds=self._deadlines.health
        )
        return health
