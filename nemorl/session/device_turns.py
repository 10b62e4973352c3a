"""Groups of processes that share devices: one has them at a time, as far as the others leave."""

import asyncio
from collections.abc import Sequence
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
    """Who has the devices. A group asks for its turn before it computes; nobody else has to remember."""

    def __init__(self, residents: Sequence[Resident]) -> None:
        self._residents = residents
        self._changing = asyncio.Lock()

    async def give_to(self, resident: Resident | None) -> None:
        """Let the others leave, and this one take back what it had there; None is generation."""
        async with self._changing:
            for other in self._residents:
                if other is not resident:
                    await other.leave()
            if resident is not None:
                await resident.settle()
