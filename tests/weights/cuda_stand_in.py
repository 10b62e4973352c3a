"""A device in the place of `CudaDevice`: its memory lies in files of a folder, which processes map.

What a process writes is with the others after `synchronize` only, as if it had been queued. Each handle can
be opened once, as CUDA counts them.
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemorl.weights.shared_memory import CudaDevice, DeviceSlots, SharedStorage


class FileDevice(CudaDevice):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._files: dict[int, Tensor] = {}  # by address of what `allocate` gave

    def allocate(self, num_bytes: int) -> Tensor:
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        path = self._folder / f"memory-{os.getpid()}-{next(self._numbers)}"
        path.write_bytes(bytes(num_bytes))
        self._files = {memory.data_ptr(): _mapped(path, num_bytes)}
        self._path = path
        return memory

    def share(self, memory: Tensor) -> SharedStorage:
        token = self._folder / f"token-{os.getpid()}-{next(self._numbers)}"
        token.write_text(str(self._path))
        return SharedStorage("GPU-0", str(token).encode(), memory.numel(), 0, b"", 0, b"", False)

    def open(self, shared: SharedStorage) -> Tensor:
        token = Path(shared.handle.decode())
        path = Path(token.read_text())
        token.unlink()
        return _mapped(path, shared.num_bytes)

    def synchronize(self, memory: Tensor) -> None:
        if memory.data_ptr() in self._files:
            self._files[memory.data_ptr()].copy_(memory)

    def collect(self) -> None:
        self._files.clear()


def with_stand_in(folder: Path, make: Callable[[], Any]) -> Any:
    """A rank whose process has such a device."""
    DeviceSlots.device = FileDevice(folder)
    return make()


def _mapped(path: Path, num_bytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
