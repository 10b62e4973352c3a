"""Memory of the pretended device: what is allocated, by part of the plan, and its peak in each phase."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .accelerator import DEVICE

# Of smaller tensors the place in the code is not looked up.
_LOCATED_BYTES = 2**20
# Files of the product whose tensors are a part of the plan of their own; all else are activations.
_PARTS = {
    "megatron/head.py": "logits",
    "models/kv_cache.py": "kv_cache",
    "weights/shared_memory.py": "staging",
}


@dataclass(frozen=True)
class Peak:
    """The largest sum of what is allocated at one time in a phase."""

    num_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    location: str = ""  # of the allocation that made it


@dataclass
class _Allocation:
    num_bytes: int
    part: str
    reference: Any


class DeviceMemory:
    """Sums the storages of pretended tensors while they live; views add nothing."""

    def __init__(self, locate: Callable[[], tuple[str, str]]) -> None:
        """`locate` gives the product's file and the place that an allocation comes from."""
        self.peaks: dict[str, Peak] = {}
        self._locate = locate
        self._phase = ""
        self._live: dict[int, _Allocation] = {}
        self._parts: Counter[str] = Counter()
        self._total = 0
        storage: Any = torch.UntypedStorage
        resize = storage.resize_

        def resize_and_note(untyped: Any, size: int) -> Any:
            result = resize(untyped, size)
            self._resized(untyped)
            return result

        storage.resize_ = resize_and_note

    @property
    def total(self) -> int:
        return self._total

    def begin(self, phase: str) -> None:
        """Peaks are those of `phase` from now on; a phase begins with what there is."""
        self._phase = phase
        self._note_peak("")

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that an operator returned, if they are new."""
        for tensor in tensors:
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == DEVICE:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._add(storage)

    def label(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Name the part of the plan to which these tensors belong."""
        for tensor in tensors:
            allocation = self._live.get(tensor.untyped_storage()._cdata)
            if allocation is not None and allocation.part != part:
                self._parts[allocation.part] -= allocation.num_bytes
                self._parts[part] += allocation.num_bytes
                allocation.part = part

    def relabel(self, old: str, part: str) -> None:
        """Move all that is left of a part to another one."""
        for allocation in self._live.values():
            if allocation.part == old:
                allocation.part = part
        self._parts[part] += self._parts.pop(old, 0)

    def _add(self, storage: Any) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        file, location = self._locate() if num_bytes >= _LOCATED_BYTES else ("", "")
        part = next((part for end, part in _PARTS.items() if file.endswith(end)), "activations")

        def freed(_: Any) -> None:
            allocation = self._live.pop(key)
            self._parts[allocation.part] -= allocation.num_bytes
            self._total -= allocation.num_bytes

        self._live[key] = _Allocation(num_bytes, part, weakref.ref(storage, freed))
        self._parts[part] += num_bytes
        self._total += num_bytes
        self._note_peak(location)

    def _resized(self, storage: Any) -> None:
        allocation = self._live.get(storage._cdata)
        if allocation is not None:
            change = storage.nbytes() - allocation.num_bytes
            allocation.num_bytes += change
            self._parts[allocation.part] += change
            self._total += change
            self._note_peak("")

    def _note_peak(self, location: str) -> None:
        peak = self.peaks.get(self._phase)
        if peak is None or self._total > peak.num_bytes:
            parts = {part: size for part, size in self._parts.items() if size}
            self.peaks[self._phase] = Peak(self._total, parts, location)
