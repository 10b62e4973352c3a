"""Parts of the GPU benchmark on the pretended accelerator, for processes of their own.

An operator with tensors of several devices is an error at once. What the benchmark asks of CUDA beyond the
rehearsal is answered here: peaks and free memory from the sizes of tensors, and torch's warnings about waits.
"""

import json
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gpu
import gpu_parity
import torch
from gpu_setting import Setting

from nemorl.rehearsal.execution import Event, Execution

_GPU_BYTES = 80 * 10**9
_PHASE = "benchmark"


def measured(part: str) -> dict[str, Any]:
    """What the process of a part prints, and the facts of the GPU."""
    with _gpu():
        gpu_parity.start = start_side
        found = gpu.measured(part, "cuda", small=True)
        json.dumps(found)
        return found | {"gpu": gpu.gpu_facts("cuda")}


@contextmanager
def _gpu() -> Iterator[None]:
    with Execution() as execution, execution.phase(_PHASE):
        execution.wrong_devices = _Refused()
        _answer_for_memory(execution)
        _answer_for_waits(execution)
        library: Any = torch
        library.cuda.nccl.version = lambda: (2, 27, 5)
        profile = library.profiler.profile
        # Of the CPU alone: the profiler would look for a driver at each operator.
        library.profiler.profile = lambda activities: profile(activities=activities[:1])
        yield


class _Refused(Counter[Event]):
    def __setitem__(self, event: Event, count: int) -> None:
        raise AssertionError(f"{event.location} {event.called_from}: {event.what}")


def _answer_for_memory(execution: Execution) -> None:
    cuda: Any = torch.cuda
    memory = execution.memory

    def reset_peak_memory_stats() -> None:
        del memory.peaks[_PHASE]
        memory.begin(_PHASE)

    cuda.memory_allocated = lambda: memory.total
    cuda.max_memory_allocated = lambda: memory.peaks[_PHASE].num_bytes
    cuda.reset_peak_memory_stats = reset_peak_memory_stats
    cuda.mem_get_info = lambda: (_GPU_BYTES - memory.total, _GPU_BYTES)
    cuda.host_memory_stats = lambda: {"allocated_bytes.current": 2**20}
    properties = vars(cuda.get_device_properties())
    properties |= {"name": "NVIDIA H100 80GB HBM3", "total_memory": _GPU_BYTES}
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(**properties)


def _answer_for_waits(execution: Execution) -> None:
    """Warn as torch does, which also warns when the mode is set for the first time."""
    modes: list[str] = []

    def set_sync_debug_mode(mode: str) -> None:
        if not modes:
            text = "Synchronization debug mode is a prototype feature and does not yet detect all "
            warnings.warn(text + "synchronizing operations", stacklevel=2)
        modes.append(mode)

    def synchronized(operator: str) -> None:
        if modes and modes[-1] == "warn":
            warnings.warn(f"called a synchronizing CUDA operation ({operator})", stacklevel=2)

    cuda: Any = torch.cuda
    cuda.set_sync_debug_mode = set_sync_debug_mode
    execution._synchronized = synchronized  # type: ignore[method-assign]


class _Side:
    """The side of `parity` that is on a GPU: its process stays pretended."""

    def __init__(self, live: Callable[[Path], gpu_parity.Life]) -> None:
        self._live = live
        self._stack = ExitStack()
        self._stack.enter_context(_gpu())

    def __call__(self, folder: Path) -> gpu_parity.Life:
        return self._live(folder)

    def close(self) -> None:
        self._stack.close()


def start_side(setting: Setting, name: str) -> Callable[[Path], gpu_parity.Life]:
    """A side of `parity`, in its process."""
    live = gpu_parity.start(setting, name)
    return live if name.startswith("cpu") else _Side(live)
