"""One node of a job: its place in the allocation, its hardware, and what it reports to the other nodes."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from nemorl.plan.machine import nvidia_smi, read_machine

from . import SlurmError

Part = Literal["gpu", "cpu"]

# nemorl.sbatch sets these: a container has no `scontrol` and does not know the id of the whole job.
NODES, JOB = "NEMORL_NODES", "NEMORL_JOB"


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job, in Slurm's order, and which of them this is."""

    job: str
    restart: int  # how often Slurm has restarted the job
    step: int  # Slurm's number of the `srun` in which this process runs
    components: tuple[tuple[str, ...], ...]  # node names; the second component of a heterogeneous job is CPU
    node: str  # this node

    @property
    def nodes(self) -> tuple[str, ...]:
        """All node names; the first is the head."""
        return tuple(name for component in self.components for name in component)

    @property
    def is_head(self) -> bool:
        """True on the node that runs the driver."""
        return self.node == self.nodes[0]

    @property
    def start(self) -> str:
        """Unique name of this start of the job: `<job>.<restart>`, and `.<step>` after a second `srun`."""
        return f"{self.job}.{self.restart}" + (f".{self.step}" if self.step else "")

    @property
    def part(self) -> Part | None:
        """Part of a heterogeneous job that this node belongs to."""
        if len(self.components) == 1:
            return None
        return "gpu" if self.node in self.components[0] else "cpu"


def read_allocation(environment: Mapping[str, str]) -> Allocation:
    """Read the variables of nemorl.sbatch and of Slurm. Raises `SlurmError` outside of a job."""
    job, components = environment.get(JOB), environment.get(NODES)
    if not job or not components:
        raise SlurmError(
            f"{JOB} and {NODES} are not set: nemorl.sbatch sets them and runs `nemorl slurm node` on each "
            "node. To start a job, run `nemorl slurm submit`."
        )
    allocation = Allocation(
        job,
        int(environment.get("SLURM_RESTART_COUNT") or 0),
        int(environment.get("SLURM_STEP_ID") or 0),
        tuple(tuple(component.split(",")) for component in components.split(";")),
        environment.get("SLURMD_NODENAME", ""),
    )
    if allocation.node not in allocation.nodes:
        raise SlurmError(
            f"SLURMD_NODENAME = {allocation.node or 'unset'}: job {job} has the nodes "
            f"{', '.join(allocation.nodes)}. Start `nemorl slurm node` with srun, one task per node."
        )
    return allocation


@dataclass(frozen=True)
class Hardware:
    """Resources of one node that the job may use."""

    cores: int
    memory_bytes: int
    shared_memory_bytes: int
    gpus: int
    nvlink_domain: str  # empty where NVLink does not connect the GPUs of several nodes
    gpus_allocated: int = 0  # by Slurm; 0 where Slurm does not count GPUs
    gpu_name: str = ""  # of the GPU with the least memory
    gpu_memory_bytes: int = 0


def read_hardware(environment: Mapping[str, str]) -> Hardware:
    """Read Slurm's numbers where they are set, else what this process can see."""
    machine = read_machine()
    cores = environment.get("SLURM_CPUS_ON_NODE", "")
    megabytes = environment.get("SLURM_MEM_PER_NODE", "")
    memory = int(megabytes) * 2**20 if megabytes.isdecimal() else 0
    allocated = environment.get("SLURM_GPUS_ON_NODE", "")
    smallest = min(machine.gpus, key=lambda gpu: gpu.memory_bytes, default=None)
    gpus = len(machine.gpus)
    # nvidia-smi lists all GPUs of a node where no cgroup hides those of other jobs; CUDA shows only these.
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name for name in visible.split(",") if name.strip() and name != "NoDevFiles"]
        gpus = min(gpus, len(names))
    return Hardware(
        int(cores) if cores.isdecimal() else machine.cores,
        min(memory, machine.memory_bytes) if memory else machine.memory_bytes,
        machine.shared_memory_bytes or 0,
        gpus,
        nvlink_domain(nvidia_smi("-q")) if machine.gpus else "",
        int(allocated) if allocated.isdecimal() else 0,
        smallest.name if smallest else "",
        smallest.memory_bytes if smallest else 0,
    )


def nvlink_domain(output: str) -> str:
    """Extract `ClusterUUID.CliqueId` from the output of `nvidia-smi -q`.

    All GPUs of a node share it. Empty where NVLink ends at the node: the cluster id is then all zeros.
    """
    cluster = re.search(r"^\s*ClusterUUID\s*:\s*([0-9A-Fa-f-]{8,})\s*$", output, re.MULTILINE)
    clique = re.search(r"^\s*CliqueId\s*:\s*(\d+)\s*$", output, re.MULTILINE)
    if cluster is None or clique is None or not cluster[1].strip("0-"):
        return ""
    return f"{cluster[1].lower()}.{clique[1]}"


@dataclass(frozen=True)
class NodeInfo:
    """What a node reports to the head."""

    node: str
    host: str  # identifies the machine; several nodes of a test share one
    address: str  # where the other nodes reach it
    interface: str
    hardware: Hardware
    free_blocks: tuple[int, ...]  # first ports of free blocks
    block_size: int  # ports per block
    part: str | None = None  # of a heterogeneous job: `gpu` or `cpu`

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        hardware, blocks = Hardware(**tree["hardware"]), tuple(tree["free_blocks"])
        return cls(**{**tree, "hardware": hardware, "free_blocks": blocks})


def host_id() -> str:
    """Host name and boot id: equal for two nodes on the same machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()
