"""Slots in a GPU's memory, which other processes of the machine open by its handle: CUDA IPC.

The protocol is that of shared memory (`shared_memory`), and so are its sockets; a handle goes over them as
JSON. All that touches CUDA is `CudaDevice`. It has not run on hardware; tests put another in its place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from .messages import SLOTS, RefitFailed


@dataclass(frozen=True)
class SharedStorage:
    """Result of torch's `_share_cuda_` for a storage, for one process to open; handles in hexadecimal."""

    device: str  # identity of the GPU, since processes number their visible GPUs
    handle: str
    num_bytes: int
    offset: int  # bytes, in the allocation
    counter_handle: str
    counter_offset: int
    event_handle: str
    event_sync_required: bool


_STORAGE = TypeAdapter(SharedStorage)


class Device(Protocol):
    """Where slots lie, and how another process gets at them."""

    def allocate(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8."""
        ...

    def share(self, memory: Tensor) -> SharedStorage:
        """Let one more process open what `allocate` gave."""
        ...

    def open(self, shared: SharedStorage) -> Tensor:
        """[num_bytes] uint8: another process's memory. Raises RefitFailed where it cannot be had."""
        ...

    def synchronize(self, memory: Tensor) -> None:
        """Wait until what this thread has queued to write or read it has been done."""
        ...

    def collect(self) -> None:
        """Take back memory that the others have closed."""
        ...


class CudaDevice:
    """The GPU that is this thread's current one."""

    def allocate(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def share(self, memory: Tensor) -> SharedStorage:
        """Each call counts one more process that has to close it."""
        device, handle, size, offset, counter, counter_offset, event, sync = (
            memory.untyped_storage()._share_cuda_()
        )
        name = str(torch.cuda.get_device_properties(device).uuid)
        return SharedStorage(
            name, handle.hex(), size, offset, counter.hex(), counter_offset, event.hex(), sync
        )

    def open(self, shared: SharedStorage) -> Tensor:
        """Raises RefitFailed where this process does not see that GPU."""
        names = [
            str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())
        ]
        if shared.device not in names:
            raise RefitFailed(
                f"the policy's buckets lie on GPU {shared.device}, and this process sees "
                f"{', '.join(names) or 'none'}: set generation.transport to nccl, or to shared_memory"
            )
        storage = torch.UntypedStorage._new_shared_cuda(
            names.index(shared.device),
            bytes.fromhex(shared.handle),
            shared.num_bytes,
            shared.offset,
            bytes.fromhex(shared.counter_handle),
            shared.counter_offset,
            bytes.fromhex(shared.event_handle),
            shared.event_sync_required,
        )
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def synchronize(self, memory: Tensor) -> None:
        """A copy between two GPUs is queued on both."""
        for device in {memory.device.index, torch.cuda.current_device()}:
            torch.cuda.current_stream(device).synchronize()

    def collect(self) -> None:
        """Take back memory that the others have closed."""
        torch.cuda.ipc_collect()


class DeviceSlots:
    """Two slots on a device (`SlotMemory`)."""

    device: ClassVar[Device] = CudaDevice()

    def __init__(self, memory: Tensor, slot_bytes: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes

    @classmethod
    @contextmanager
    def make(cls, name: str, slot_bytes: int) -> Iterator["DeviceSlots"]:
        """A sender's; receivers that still have it open keep it until they close it."""
        try:
            yield cls(cls.device.allocate(SLOTS * slot_bytes), slot_bytes)
        finally:
            cls.device.collect()

    @classmethod
    def open(cls, offer: bytes, descriptors: list[int], slot_bytes: int) -> "DeviceSlots":
        """A sender's, by what it offers. Raises RefitFailed where it cannot be had."""
        try:
            shared = _STORAGE.validate_json(offer)
        except ValidationError as error:
            raise RefitFailed(f"a handle of a GPU's memory cannot be read: {error}") from error
        return cls(cls.device.open(shared), slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Of both slots."""
        return self._memory.numel()

    def offer(self) -> tuple[bytes, list[int]]:
        """What one more receiver opens it by."""
        return _STORAGE.dump_json(self.device.share(self._memory)), []

    def slot(self, number: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, a view."""
        start = number % SLOTS * self._slot_bytes
        return self._memory[start : start + num_bytes]

    def settle(self) -> None:
        """Wait until what was queued to write or read it has been done."""
        self.device.synchronize(self._memory)
