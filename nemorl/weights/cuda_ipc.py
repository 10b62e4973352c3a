"""Slots in a GPU's memory, which other processes of the machine open by its handle: CUDA IPC.

The protocol is that of shared memory (`shared_memory`), and so are its sockets; a handle goes over them as
JSON. All that touches CUDA is `CudaDevice`. It has not run on hardware; tests replace it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from .messages import SLOTS, RefitFailed, Slots


@dataclass(frozen=True)
class SharedStorage:
    """Result of torch's `_share_cuda_` for a storage, for one process to open."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    device: str  # identity of the GPU, since processes number their visible GPUs
    handle: bytes
    num_bytes: int
    offset: int  # bytes, in the allocation
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool


_STORAGE = TypeAdapter(SharedStorage)


class CudaDevice:
    """Memory of this thread's current GPU, and how another process opens it."""

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def share(self, memory: Tensor) -> SharedStorage:
        """Let one more process open memory from `allocate`: each call counts one that has to close it."""
        device, *shared = memory.untyped_storage()._share_cuda_()
        return SharedStorage(str(torch.cuda.get_device_properties(device).uuid), *shared)

    def open(self, shared: SharedStorage) -> Tensor:
        """[num_bytes] uint8: another process's memory. Raises RefitFailed if its GPU is not visible here."""
        gpus = range(torch.cuda.device_count())
        names = [str(torch.cuda.get_device_properties(index).uuid) for index in gpus]
        if shared.device not in names:
            raise RefitFailed(
                f"the policy's buckets lie on GPU {shared.device}, and this process sees "
                f"{', '.join(names) or 'none'}: set generation.transport to nccl, or to shared_memory"
            )
        device, *handles = astuple(shared)
        storage = torch.UntypedStorage._new_shared_cuda(names.index(device), *handles)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def synchronize(self, memory: Tensor) -> None:
        """Wait for this thread's queued reads and writes; a copy between two GPUs is queued on both."""
        for device in {memory.device.index, torch.cuda.current_device()}:
            torch.cuda.current_stream(device).synchronize()

    def collect(self) -> None:
        """Free memory that the others have closed."""
        torch.cuda.ipc_collect()


class DeviceSlots(Slots):
    """Slots on a device."""

    device: ClassVar[CudaDevice] = CudaDevice()

    @classmethod
    @contextmanager
    def make(cls, name: str, slot_bytes: int) -> Iterator["DeviceSlots"]:
        """A sender's slots; receivers that still have them open keep them until they close them."""
        try:
            yield cls(cls.device.allocate(SLOTS * slot_bytes))
        finally:
            cls.device.collect()

    @classmethod
    def open(cls, offer: bytes, descriptors: list[int], slot_bytes: int) -> "DeviceSlots":
        try:
            return cls(cls.device.open(_STORAGE.validate_json(offer)))
        except ValidationError as error:
            raise RefitFailed(f"a handle of a GPU's memory cannot be read: {error}") from error

    def offer(self) -> tuple[bytes, list[int]]:
        return _STORAGE.dump_json(self.device.share(self.memory)), []

    def settle(self) -> None:
        self.device.synchronize(self.memory)
