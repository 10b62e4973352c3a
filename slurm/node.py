"""One node of a job: its place in the allocation, its hardware, its network interface, and its ports.

Every node reports free blocks of ports and the head chooses, so that nodes that share a machine get different
ones. Jobs begin the search at places given by their ids, so that two jobs rarely compete for a block.
"""

import asyncio
import fcntl
import itertools
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from nemorl.plan.machine import nvidia_smi, read_machine

from . import OptionError, SlurmError

# nemorl.sbatch sets these: a container has no `scontrol` and does not know the id of the whole job.
NODES, JOB = "NEMORL_NODES", "NEMORL_JOB"
INTERFACE = "NEMORL_INTERFACE"
PORTS = "NEMORL_PORTS"
DEFAULT_PORTS = "20000-29999"  # below Linux's ephemeral ports, which begin at 32768
NUM_FIXED_PORTS = 10  # of a block; the rest is for Ray's workers
MAX_BLOCKS = 32  # free blocks that a node reports; as many nodes can share a machine

_SIOCGIFADDR = 0x8915
_ANYWHERE = "192.0.2.1"  # reserved for documentation: nothing is sent, only the route is looked up
# Listeners of Ray after the head's own two; Ray 2.60 always starts the last one: it refuses port 0.
_RAY_LISTENERS = (
    *("node-manager-port", "object-manager-port", "metrics-export-port", "dashboard-agent-listen-port"),
    *("dashboard-agent-grpc-port", "runtime-env-agent-port", "ray-client-server-port"),
)

T = TypeVar("T")


@dataclass(frozen=True)
class Allocation:
    job: str
    restart: int  # how often Slurm has restarted the job
    step: int  # Slurm's number of the `srun` in which this process runs
    components: tuple[tuple[str, ...], ...]  # node names; the second component of a heterogeneous job is CPU
    node: str  # this node

    @property
    def nodes(self) -> tuple[str, ...]:
        """The first is the head."""
        return tuple(name for component in self.components for name in component)

    @property
    def is_head(self) -> bool:
        return self.node == self.nodes[0]

    @property
    def start(self) -> str:
        """Unique name of this start of the job: `<job>.<restart>`, and `.<step>` after a second `srun`."""
        return f"{self.job}.{self.restart}" + (f".{self.step}" if self.step else "")

    @property
    def part(self) -> str | None:
        """Part of a heterogeneous job that this node belongs to: `gpu` or `cpu`."""
        if len(self.components) == 1:
            return None
        return "gpu" if self.node in self.components[0] else "cpu"


def read_allocation(environment: Mapping[str, str]) -> Allocation:
    """Read the variables of nemorl.sbatch and of Slurm. Raises `SlurmError` outside of a job."""
    job, components = environment.get(JOB), environment.get(NODES)
    if not job or not components:
        fix = "nemorl.sbatch sets them on each node. To start a job, run `nemorl slurm submit`."
        raise SlurmError(f"{JOB} and {NODES} are not set: {fix}")
    restart, step = (int(environment.get(v) or 0) for v in ("SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
    names = tuple(tuple(component.split(",")) for component in components.split(";"))
    allocation = Allocation(job, restart, step, names, environment.get("SLURMD_NODENAME", ""))
    if allocation.node not in allocation.nodes:
        problem = f"{allocation.node or 'unset'}: job {job} has the nodes {', '.join(allocation.nodes)}"
        fix = "Start `nemorl slurm node` with srun, one task per node."
        raise SlurmError(f"SLURMD_NODENAME = {problem}. {fix}")
    return allocation


@dataclass(frozen=True)
class Hardware:
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

    def number(name: str) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else 0

    machine = read_machine()
    gpus = len(machine.gpus)
    smallest = min(machine.gpus, key=lambda gpu: gpu.memory_bytes, default=None)
    # nvidia-smi lists all GPUs of a node where no cgroup hides those of other jobs; CUDA shows only these.
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = min(gpus, sum(bool(name.strip()) and name != "NoDevFiles" for name in visible.split(",")))
    return Hardware(
        number("SLURM_CPUS_ON_NODE") or machine.cores,
        min(number("SLURM_MEM_PER_NODE") * 2**20 or machine.memory_bytes, machine.memory_bytes),
        machine.shared_memory_bytes or 0,
        gpus,
        nvlink_domain(nvidia_smi("-q")) if machine.gpus else "",
        number("SLURM_GPUS_ON_NODE"),
        smallest.name if smallest else "",
        smallest.memory_bytes if smallest else 0,
    )


def nvlink_domain(output: str) -> str:
    """Extract `ClusterUUID.CliqueId` from `nvidia-smi -q`; empty where NVLink ends at the node."""
    cluster = re.search(r"^\s*ClusterUUID\s*:\s*([0-9A-Fa-f-]{8,})\s*$", output, re.MULTILINE)
    clique = re.search(r"^\s*CliqueId\s*:\s*(\d+)\s*$", output, re.MULTILINE)
    if cluster is None or clique is None or not cluster[1].strip("0-"):  # all zeros
        return ""
    return f"{cluster[1].lower()}.{clique[1]}"


@dataclass(frozen=True)
class NodeInfo:
    node: str
    host: str  # identifies the machine; several nodes of a test share one
    address: str  # where the other nodes reach it
    interface: str
    hardware: Hardware
    free_blocks: tuple[int, ...]  # first ports of free blocks
    block_size: int  # ports per block
    part: str | None = None  # of a heterogeneous job: `gpu` or `cpu`

    @classmethod
    def read(cls, allocation: Allocation, environment: Mapping[str, str]) -> Self:
        interface, hardware = select_interface(environment), read_hardware(environment)
        boot = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        # Ports of a node: Ray's own, and one for each worker process, idle ones included.
        size = NUM_FIXED_PORTS + 40 + 2 * hardware.cores
        blocks = free_blocks(parse_ports(environment), size, allocation.job)
        host = f"{socket.gethostname()} {boot}".strip()
        address, name = interface.address, interface.name
        return cls(allocation.node, host, address, name, hardware, blocks, size, allocation.part)


class Interface(NamedTuple):
    name: str
    address: str


def interfaces() -> tuple[Interface, ...]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    return tuple(found)


def select_interface(environment: Mapping[str, str]) -> Interface:
    """NEMORL_INTERFACE, else that of the host name or of the default route, else any. Raises `SlurmError`."""
    available = interfaces()
    if name := environment.get(INTERFACE):
        by_name = {interface.name: interface for interface in available}
        if name in by_name:
            return by_name[name]
        problem = f"{INTERFACE} = {name}: {socket.gethostname()} has no such interface with an IPv4 address"
        raise SlurmError(f"{problem}. Use one of {', '.join(by_name)} that every node has, or unset it.")
    by_address = {interface.address: interface for interface in available}
    preferred = [by_address[address] for address in _preferred_addresses() if address in by_address]
    if not available:
        raise SlurmError(f"{socket.gethostname()} has no network interface with an IPv4 address.")
    # The first, unless it is loopback.
    return min([*preferred, *available], key=lambda interface: interface.address.startswith("127."))


def _preferred_addresses() -> list[str]:
    found = []
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_ANYWHERE, 9))
        found.append(str(probe.getsockname()[0]))
    return found


async def retry(attempt: Callable[[], Awaitable[T]], seconds: float, failure: str) -> T:
    """Call until no connection fails. Raises `SlurmError` after `seconds`: `failure` with the `{error}`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            async with asyncio.timeout(max(0.1, min(10.0, deadline - loop.time()))):
                return await attempt()
        except (OSError, TimeoutError) as error:
            if loop.time() > deadline:
                raise SlurmError(failure.format(error=error or "no answer")) from None
            await asyncio.sleep(0.5)


async def wait_until_reachable(address: str, seconds: float, node: str) -> None:
    """Wait on `node` until Ray's head accepts connections. Raises `SlurmError`; Ray would retry longer."""
    host, _, port = address.rpartition(":")
    problem = f"{node} cannot reach Ray's head at {address} ({{error}})"
    failure = f"{problem}: open the ports between the nodes, or see the head's log."
    _, writer = await retry(lambda: asyncio.open_connection(host, int(port)), seconds, failure)
    writer.close()


@dataclass(frozen=True)
class Ports:
    first: int
    last: int

    @property
    def gcs(self) -> int:
        return self.first

    @property
    def control(self) -> int:
        return self.first + 1

    @property
    def ray_options(self) -> dict[str, int]:
        fixed = {name: port for port, name in enumerate(_RAY_LISTENERS, start=self.first + 2)}
        return fixed | {"min-worker-port": self.first + NUM_FIXED_PORTS, "max-worker-port": self.last}


def parse_ports(environment: Mapping[str, str]) -> range:
    """Parse NEMORL_PORTS, such as `20000-29999`. Raises `OptionError`."""
    text = environment.get(PORTS) or DEFAULT_PORTS
    found = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", text)
    if found is None or not 1024 <= int(found[1]) < int(found[2]) <= 65535:
        form = f"expected the first and the last port, from 1024 to 65535, such as {DEFAULT_PORTS}"
        raise OptionError(f"{PORTS} = {text}: {form}")
    return range(int(found[1]), int(found[2]) + 1)


def free_blocks(ports: range, size: int, job: str) -> tuple[int, ...]:
    """First ports of the blocks of this machine in which nothing listens, in the order of this job."""
    blocks = len(ports) // size
    offset = int("".join(filter(str.isdecimal, job)) or 0)
    firsts = (ports[0] + (offset + i) % blocks * size for i in range(blocks))
    free = (first for first in firsts if all(_is_free(port) for port in range(first, first + size)))
    return tuple(itertools.islice(free, MAX_BLOCKS))


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection may linger
        probe.bind(("", port))
        return True
    return False


def assign_ports(nodes: Mapping[str, NodeInfo]) -> dict[str, Ports]:
    """Assign a block to each node, without overlap on a shared machine. Raises `SlurmError`."""
    assigned: dict[str, Ports] = {}
    for name, info in nodes.items():
        taken = [ports for other, ports in assigned.items() if nodes[other].host == info.host]
        candidates = (Ports(first, first + info.block_size - 1) for first in info.free_blocks)
        free = (b for b in candidates if all(b.last < other.first or other.last < b.first for other in taken))
        if (block := next(free, None)) is None:
            problem = f"{name} has no {info.block_size} consecutive free ports in the range"
            raise SlurmError(f"{PORTS}: {problem}. Set a larger range, or another one.")
        assigned[name] = block
    return assigned
