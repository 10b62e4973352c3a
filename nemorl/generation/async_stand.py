"""Standing still between two steps, for whoever wants it and only as long."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

# That going on may take an engine which could not be brought to a stand.
_GRACE_SECONDS = 5.0


class Stand:
    """Whether an engine stands: from the first who wants it to the last. Belongs to one event loop."""

    def __init__(
        self,
        freeze: Callable[[], Awaitable[None]],
        thaw: Callable[[], Awaitable[None]],
        fail: Callable[[Exception], None],
    ) -> None:
        """`fail` hears of an engine that does not go on."""
        self._freeze, self._thaw, self._fail = freeze, thaw, fail
        self._holders: set[object] = set()  # who wants it to stand
        self._turning = asyncio.Lock()  # held while it comes to a stand or goes on
        self.still = asyncio.Event()  # it has come to a stand

    @property
    def wanted(self) -> bool:
        """Whether it stands, or is coming to a stand."""
        return bool(self._holders)

    async def hold(self, who: object) -> None:
        """Return when it stands, until `release`. If it does not come to a stand in time it goes on."""
        self._holders.add(who)
        try:
            await self._settle()
        except BaseException:
            self._holders.discard(who)
            if self.still.is_set():  # others may have gone meanwhile
                await self._settle()
            raise

    async def release(self, who: object) -> None:
        """Return when it goes on, or stands for others only."""
        if who in self._holders:
            self._holders.discard(who)
            await self._settle()

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """It stands while the block runs."""
        who = object()
        await self.hold(who)
        try:
            yield
        finally:
            await self.release(who)

    async def _settle(self) -> None:
        async with self._turning:
            if self.wanted and not self.still.is_set():
                try:
                    await self._freeze()
                except BaseException:  # also where nobody waits any longer
                    with suppress(Exception):  # which `fail` has heard of
                        await self._go_on(_GRACE_SECONDS)
                    raise
                self.still.set()
            elif not self.wanted and self.still.is_set():
                await self._go_on(None)
                self.still.clear()

    async def _go_on(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds) as limit:
                await self._thaw()
        except Exception as error:
            neither = TimeoutError("it came to no stand, and does not go on either")
            self._fail(neither if limit.expired() else error)
            raise
