"""Time-sharing of devices: groups of processes that compute on the same devices take turns on them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of

from .handles import ModelHandle


class Tenant(Protocol):
    """A group on the shared devices."""

    async def offload(self) -> None:
        """Leave the devices as far as its configuration says; does nothing if it has left."""
        ...

    async def reload(self) -> None:
        """Take back what was offloaded; does nothing if nothing was."""
        ...


class DeviceScheduler:
    """Decides who has the devices. A group asks for its turn before it computes.

    Reward models are called by rollout workers, at any time: they get the devices during generation, and keep
    them until they have answered.
    """

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._tenants = [*tenants]
        self._changing = asyncio.Condition()
        self._generating = False  # it is generation's turn

    def join(self, tenant: Tenant) -> None:
        """Add a tenant, which is on the devices now."""
        self._tenants.append(tenant)

    async def give_to(self, tenant: Tenant | None) -> None:
        """Let the others offload, then this one reload; None is generation."""
        async with self._changing:
            await self._change_to(tenant)
            self._generating = tenant is None
            self._changing.notify_all()

    @asynccontextmanager
    async def borrow_during_generation(self, tenant: Tenant) -> AsyncIterator[None]:
        """Inside, this one has the devices. It waits for generation's turn; the next turn waits for it."""
        async with self._changing:
            await self._changing.wait_for(lambda: self._generating)
            await self._change_to(tenant)
            yield

    async def _change_to(self, tenant: Tenant | None) -> None:
        for other in self._tenants:
            if other is not tenant:
                await other.offload()
        if tenant is not None:
            await tenant.reload()


def share_policy_devices(experiment: Experiment, models: dict[str, ModelHandle]) -> None:
    """Have the models on the policy's devices take turns."""
    tenants = [
        models[spec.name]
        for spec in models_of(experiment)
        if spec.name in models and (spec.name == "policy" or spec.on_policy_devices)
    ]
    scheduler = DeviceScheduler(tenants)
    for tenant in tenants:
        tenant.devices = scheduler
