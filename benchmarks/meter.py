"""Seconds and peak memory of a stretch of work in this process, on the CPU or on a GPU.

On the CPU the peak is the kernel's high-water mark of resident memory, set back before the work; it counts
one process, so what is compared runs in processes of its own. On a GPU it is that of torch's allocator.
"""

import ctypes
import gc
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from nemorl.megatron.device import DeviceKind

Result = TypeVar("Result")


@dataclass(frozen=True)
class Span:
    """Time that some work took."""

    seconds: float
    cpu_seconds: float  # of all threads of the process; other processes on the machine hardly change it

    def __sub__(self, other: "Span") -> "Span":
        return Span(self.seconds - other.seconds, self.cpu_seconds - other.cpu_seconds)

    def __add__(self, other: "Span") -> "Span":
        return Span(self.seconds + other.seconds, self.cpu_seconds + other.cpu_seconds)


@dataclass(frozen=True)
class Memory:
    """Bytes that the process, or its GPU, held."""

    before_bytes: int  # weights, gradients, optimizer state, libraries
    peak_bytes: int

    @property
    def work_bytes(self) -> int:
        """What the work itself held at its worst, such as activations and logits."""
        return self.peak_bytes - self.before_bytes


def now(kind: DeviceKind) -> Span:
    """Clocks, after the device has completed its work."""
    if kind == "cuda":
        torch.cuda.synchronize()
    return Span(time.perf_counter(), time.process_time())


def measured(kind: DeviceKind, work: Callable[[], Result]) -> tuple[Result, Span, Memory]:
    """Do the work; its result, its time and the memory of this process meanwhile."""
    before = start_of_peak(kind)
    start = now(kind)
    result = work()
    return result, now(kind) - start, Memory(before, peak(kind))


def start_of_peak(kind: DeviceKind) -> int:
    """Set the process's high-water mark back to what is held now; that many bytes."""
    gc.collect()
    if kind == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator kept would count as held
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def peak(kind: DeviceKind) -> int:
    """Bytes at the high-water mark since `start_of_peak`."""
    return torch.cuda.max_memory_allocated() if kind == "cuda" else resident_peak("self")


def resident_peak(process: int | Literal["self"]) -> int:
    """Bytes at the high-water mark of a process's resident memory. Raises OSError if it is gone."""
    for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"/proc/{process}/status names no VmHWM: the process ended, or this is no Linux")


# Dense bfloat16 operations a second of one device, from NVIDIA's data sheets; the first that fits counts.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}


# Bytes a second of its memory, from the same.
_PEAK_BANDWIDTH = {
    "B200": 8.0e12,
    "H200": 4.8e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "A100": 2.0e12,
    "L40S": 0.864e12,
    "L4": 0.3e12,
}


def peak_flops(kind: DeviceKind) -> float | None:
    """Of the device in bfloat16; None where it is not known, as on a CPU."""
    return _of_this_gpu(_PEAK_FLOPS) if kind == "cuda" else None


def peak_bandwidth(kind: DeviceKind) -> float | None:
    """Of the device's memory in bytes a second; None where it is not known, as on a CPU."""
    return _of_this_gpu(_PEAK_BANDWIDTH) if kind == "cuda" else None


def _of_this_gpu(table: Mapping[str, float]) -> float | None:
    device = torch.cuda.get_device_name()
    return next((value for name, value in table.items() if name in device), None)
