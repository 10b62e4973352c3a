"""What the machine at hand offers."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NVIDIA_SMI_SECONDS = 20


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """Resources that this process may use."""

    cores: int
    memory_bytes: int
    shared_memory_bytes: int | None  # size of /dev/shm; None where there is none
    gpus: tuple[Gpu, ...]
    nodes: int = 0  # of a job that this stands for; 0 for the machine at hand
    same_packages: bool = True  # that are installed here; an image has its own

    @property
    def has(self) -> str:
        """For messages."""
        return f"the {self.nodes} nodes of the job have" if self.nodes > 1 else "this machine has"


def read_machine() -> Machine:
    """The machine this runs on, within the limits of its container."""
    shared = Path("/dev/shm")
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        shared_memory_bytes=shutil.disk_usage(shared).total if shared.is_dir() else None,
        gpus=_gpus(),
    )


def _memory_bytes() -> int:
    """A container's limit is a huge number, or the word `max`, where there is none."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = [Path(file).read_text(encoding="ascii").strip() for file in _CGROUP_LIMITS if Path(file).exists()]
    return min([physical, *(int(text) for text in texts if text.isdecimal())])


def _gpus() -> tuple[Gpu, ...]:
    """As the driver's own tool lists them; none where it is not installed or does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if answer.returncode != 0:
        return ()
    return parse_gpus(answer.stdout)


def parse_gpus(listed: str) -> tuple[Gpu, ...]:
    """Lines such as `NVIDIA H100 80GB HBM3, 81559`, memory in MiB; unified-memory devices name no number."""
    gpus = []
    for line in listed.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdecimal():
            gpus.append(Gpu(name.strip(), int(mebibytes) * 2**20))
    return tuple(gpus)
