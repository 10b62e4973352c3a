"""What a node gives to a run: cores, memory, GPUs and the NVLink domain they are in."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from nemorl.plan.machine import read_machine

_NVIDIA_SMI_SECONDS = 30


@dataclass(frozen=True)
class Hardware:
    """Of one node, as far as the job may use it."""

    cores: int
    memory_bytes: int
    shared_memory_bytes: int
    gpus: int
    nvlink_domain: str  # empty where the GPUs of several nodes are not connected
    gpus_given: int = 0  # by Slurm; it says nothing where it does not count them
    gpu_name: str = ""  # of the GPU with the least memory
    gpu_memory_bytes: int = 0

    @property
    def is_blind(self) -> bool:
        """Whether there are fewer GPUs than Slurm gave: one is broken, or its driver does not answer."""
        return self.gpus < self.gpus_given


def read_hardware(environment: Mapping[str, str]) -> Hardware:
    """Of this node: Slurm's numbers where it gives some, else what the process can see."""
    machine = read_machine()
    cores = environment.get("SLURM_CPUS_ON_NODE", "")
    megabytes = environment.get("SLURM_MEM_PER_NODE", "")
    memory = int(megabytes) * 2**20 if megabytes.isdecimal() else 0
    given = environment.get("SLURM_GPUS_ON_NODE", "")
    smallest = min(machine.gpus, key=lambda gpu: gpu.memory_bytes, default=None)
    return Hardware(
        int(cores) if cores.isdecimal() else machine.cores,
        min(memory, machine.memory_bytes) if memory else machine.memory_bytes,
        machine.shared_memory_bytes or 0,
        _gpus(environment, len(machine.gpus)),
        nvlink_domain(_nvidia_smi()) if machine.gpus else "",
        int(given) if given.isdecimal() else 0,
        smallest.name if smallest else "",
        smallest.memory_bytes if smallest else 0,
    )


def _gpus(environment: Mapping[str, str], seen: int) -> int:
    """Those that CUDA would show. `nvidia-smi` lists all of a node where no cgroup hides the others."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return seen
    return min(seen, len([name for name in visible.split(",") if name.strip() and name != "NoDevFiles"]))


def _nvidia_smi() -> str:
    try:
        told = subprocess.run(
            ["nvidia-smi", "-q"], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout if told.returncode == 0 else ""


def nvlink_domain(told: str) -> str:
    """`ClusterUUID.CliqueId` from the output of `nvidia-smi -q`; empty where NVLink ends at the node.

    Every GPU of a node is in the same one; a cluster id of zeros means that there is none.
    """
    cluster = re.search(r"^\s*ClusterUUID\s*:\s*([0-9A-Fa-f-]{8,})\s*$", told, re.MULTILINE)
    clique = re.search(r"^\s*CliqueId\s*:\s*(\d+)\s*$", told, re.MULTILINE)
    if cluster is None or clique is None or not cluster[1].strip("0-"):
        return ""
    return f"{cluster[1].lower()}.{clique[1]}"
