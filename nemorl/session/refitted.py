"""What the hosts of engines that others wrote have in common when new weights come."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from nemorl.generation.async_engine import AsyncBackend, AsyncEngineWorker
from nemorl.generation.types import EngineFailed
from nemorl.weights.session import RefitDeadline, RefitFailed


class RefittedEngine(AsyncEngineWorker):
    """An engine that comes to a stand for new weights, and answers nothing when it may have torn ones."""

    def __init__(self, backend: AsyncBackend, name: str, *, commit_seconds: float) -> None:
        """`commit_seconds` is the most that coming to a stand may last."""
        super().__init__(backend, name)
        self._commit_seconds = commit_seconds

    @asynccontextmanager
    async def _standing_for(self, version: int, *, drain: bool) -> AsyncIterator[None]:
        """`standing`, which must begin in time. Raises `RefitDeadline`."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._commit_seconds):
                    await stack.enter_async_context(self.standing(drain=drain))
            except TimeoutError as error:
                raise RefitDeadline(
                    f"refit to version {version}: {self._name} did not come to a stand within "
                    f"{self._commit_seconds:g} s (cluster.deadlines.refit)"
                ) from error
            yield

    def _torn_by(self, version: int, error: Exception) -> RefitFailed:
        """The failure of taking a version, after which the engine answers nothing; to be raised."""
        torn = f"{self._name} may have weights of no version, since it failed to take version {version}"
        self.fail(EngineFailed(f"{torn}: {error}"))
        return RefitFailed(f"refit to version {version}: {error}; {torn}")
