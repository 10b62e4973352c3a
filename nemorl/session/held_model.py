"""All ranks of a model as one: on the devices, beside them, sampling, and in checkpoints."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from nemorl.cluster.errors import ClusterError
from nemorl.cluster.group import Worker, WorkerGroup
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import DeadlineConfig
from nemorl.megatron.checkpoint_store import FileRecord

from .device_turns import DeviceTurns

# Beyond a deadline that the ranks keep by themselves, and then say what did not finish.
GRACE_SECONDS = 30.0


class HeldModel:
    """A model that its ranks hold, and take turns on the devices with. Belongs to one event loop."""

    def __init__(
        self, group: WorkerGroup, config: PolicyConfig, deadlines: DeadlineConfig, *, trains: bool
    ) -> None:
        self.group = group
        self.trains = trains
        self._config = config
        self._deadlines = deadlines
        self.turns: DeviceTurns | None = None  # of groups that share devices
        self._is_away = False

    async def leave(self) -> None:
        """Leave the devices as far as `offload` says. What needs them later takes them back by itself."""
        wanted = self._config.offload
        if (wanted.weights or wanted.optimizer) and not self._is_away:
            self._is_away = True
            await self.group.call_async("offload", stage="offload", deadline_seconds=self._deadlines.refit)

    async def settle(self) -> None:
        """Undo `leave`."""
        if self._is_away:
            await self.group.call_async("onload", stage="onload", deadline_seconds=self._deadlines.refit)
            self._is_away = False

    async def come_back(self) -> None:
        """Take the devices; the groups that share them leave, as far as theirs says."""
        if self.turns is None:
            await self.settle()
        else:
            await self.turns.give_to(self)

    async def give_devices_away(self) -> None:
        """Let generation have the devices: all that live there leave."""
        if self.turns is None:
            await self.leave()
        else:
            await self.turns.give_to(None)

    async def gpus(self) -> list[tuple[str, ...]]:
        """Of each rank, by the names that CUDA_VISIBLE_DEVICES takes; none on a CPU."""
        return await self.group.call_async("gpus", stage="start", deadline_seconds=self._deadlines.start)

    @property
    def samplers(self) -> list[Worker]:
        """Of a policy that samples by itself: who answers requests, one for each data-parallel copy."""
        return [self.group.workers[rank].serving() for rank in self.group.mesh.output_ranks]

    @asynccontextmanager
    async def sampling(self, version: int) -> AsyncIterator[None]:
        """Inside, the policy samples by itself; its weights are of `version`. It does nothing else there."""
        seconds = self._deadlines.generation + GRACE_SECONDS
        serving = asyncio.ensure_future(
            self.group.call_async("serve", version, stage="generation", deadline_seconds=seconds)
        )
        try:
            yield
        finally:
            with suppress(ClusterError):  # what ended a rank ended `serve` too, which tells of it
                await asyncio.gather(
                    *(
                        worker.call_async("stop_serving", stage="generation", deadline_seconds=seconds)
                        for worker in self.samplers
                    )
                )
            await serving

    async def save(self, folder: Path) -> list[FileRecord]:
        """Write model, optimizer, schedule and random states into a folder."""
        await self.come_back()
        return _together(await self._checkpoint("save_checkpoint", folder.absolute()))

    async def copy_for_checkpoint(self) -> None:
        """Copy all that aside, in the memory of the ranks."""
        await self.come_back()
        await self._checkpoint("copy_for_checkpoint")

    async def write_copy(self, folder: Path) -> list[FileRecord]:
        """Write what was copied, while the ranks do other work; ends before anything is copied again."""
        records = await self.group.call_beside_async(
            "write_copy",
            folder.absolute(),
            stage="checkpoint",
            deadline_seconds=self._deadlines.checkpoint,
        )
        return _together(records)

    async def restore(self, folder: Path) -> None:
        """Take all that from a folder."""
        await self.come_back()
        await self._checkpoint("load_checkpoint", folder.absolute())

    async def header(self) -> dict[str, str]:
        """Device, layout and kernels in use."""
        found = await self.group.call_async("header", stage="start", deadline_seconds=self._deadlines.start)
        return found[0]  # type: ignore[no-any-return]

    async def _checkpoint(self, method: str, *args: Path) -> list[Any]:
        return await self.group.call_async(
            method, *args, stage="checkpoint", deadline_seconds=self._deadlines.checkpoint
        )


def _together(records: Sequence[tuple[FileRecord, ...]]) -> list[FileRecord]:
    return [record for of_rank in records for record in of_rank]
