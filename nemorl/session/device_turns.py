"""Groups of processes that share devices: one has them at a time, as far as the others leave."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol


class Resident(Protocol):
    """A group that lives on the shared devices."""

    async def leave(self) -> None:
        """Leave the devices as far as it is told to; does nothing while it is away."""
        ...

    async def settle(self) -> None:
        """Take back what has left; does nothing where nothing has."""
        ...


class DeviceTurns:
    """Who has the devices. A group asks for its turn before it computes; nobody else has to remember.

    Reward models are asked by others than the loop, at any time: they get the devices while something is
    sampled, and keep them until they have answered.
    """

    def __init__(self, residents: Sequence[Resident]) -> None:
        self._residents = [*residents]
        self._changing = asyncio.Condition()
        self._sampling = False  # it is generation's turn

    def join(self, resident: Resident) -> None:
        """One more lives there, and is there now."""
        self._residents.append(resident)

    async def give_to(self, resident: Resident | None) -> None:
        """Let the others leave, and this one take back what it had there; None is generation."""
        async with self._changing:
            await self._change_to(resident)
            self._sampling = resident is None
            self._changing.notify_all()

    @asynccontextmanager
    async def lent_by_generation(self, resident: Resident) -> AsyncIterator[None]:
        """Inside, this one has the devices. It waits for generation's turn; the next turn waits for it."""
        async with self._changing:
            await self._changing.wait_for(lambda: self._sampling)
            await self._change_to(resident)
            yield

    async def _change_to(self, resident: Resident | None) -> None:
        for other in self._residents:
            if other is not resident:
                await other.leave()
        if resident is not None:
            await resident.settle()
