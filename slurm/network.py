"""The network interface between the nodes, and a block of ports for each node.

Every node searches for free blocks itself and the head chooses, so that nodes that share a machine get
different ones. Jobs begin the search at different places, by their ids, so that two jobs that start at the
same time on one machine rarely compete for a block.
"""

import asyncio
import fcntl
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from . import OptionError, SlurmError
from .node import NodeInfo

INTERFACE = "NEMORL_INTERFACE"
PORTS = "NEMORL_PORTS"
DEFAULT_PORTS = "20000-29999"  # below Linux's ephemeral ports, which begin at 32768
NUM_FIXED_PORTS = 10  # of a block; the rest is for Ray's workers
MAX_BLOCKS = 32  # free blocks that a node reports; as many nodes can share a machine

_SIOCGIFADDR = 0x8915
_ANYWHERE = "192.0.2.1"  # reserved for documentation: nothing is sent, only the route is looked up


@dataclass(frozen=True)
class Interface:
    """A network interface with its IPv4 address."""

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        return self.address.startswith("127.")


def interfaces() -> tuple[Interface, ...]:
    """List this machine's interfaces that have an IPv4 address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # no address
                continue
            found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    return tuple(found)


def select_interface(environment: Mapping[str, str]) -> Interface:
    """Choose the interface for talking to the other nodes.

    NEMORL_INTERFACE, else the interface of the host name's address, else of the default route, else any
    other; loopback only where there is nothing else. Raises `SlurmError`.
    """
    available = interfaces()
    if name := environment.get(INTERFACE):
        for interface in available:
            if interface.name == name:
                return interface
        names = ", ".join(interface.name for interface in available)
        raise SlurmError(
            f"{INTERFACE} = {name}: {socket.gethostname()} has no such interface with an IPv4 address. Use "
            f"one of {names} that every node has, or unset it."
        )
    by_address = {interface.address: interface for interface in available}
    preferred = [by_address.get(address or "") for address in (_host_address(), _route_address())]
    candidates = [interface for interface in (*preferred, *available) if interface is not None]
    if not candidates:
        raise SlurmError(f"{socket.gethostname()} has no network interface with an IPv4 address.")
    return min(candidates, key=lambda interface: interface.is_loopback)  # the first, unless it is loopback


def _host_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _route_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ANYWHERE, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


async def wait_until_reachable(address: str, seconds: float, node: str) -> None:
    """Wait until Ray's head accepts connections; Ray itself would retry for minutes without naming it.

    `node` is where this runs. Raises `SlurmError`.
    """
    host, _, port = address.rpartition(":")
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            async with asyncio.timeout(10):
                _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            return
        except (OSError, TimeoutError) as error:
            if asyncio.get_running_loop().time() > deadline:
                raise SlurmError(
                    f"{node} cannot reach Ray's head at {address} ({error or 'no answer'}): open the ports "
                    "between the nodes, or see the head's log."
                ) from None
            await asyncio.sleep(0.5)


@dataclass(frozen=True)
class Ports:
    """The port block of one node."""

    first: int
    last: int

    @property
    def gcs(self) -> int:
        """Port of Ray's address, on the head."""
        return self.first

    @property
    def control(self) -> int:
        """Port of the head's launcher."""
        return self.first + 1

    @property
    def ray_options(self) -> dict[str, int]:
        """Port options of `ray start`."""
        names = (
            "node-manager-port",
            "object-manager-port",
            "metrics-export-port",
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
            "ray-client-server-port",  # Ray 2.60 always starts this server: it refuses 0
        )
        fixed = {name: self.first + 2 + i for i, name in enumerate(names)}
        return fixed | {"min-worker-port": self.first + NUM_FIXED_PORTS, "max-worker-port": self.last}


def parse_ports(environment: Mapping[str, str]) -> range:
    """Parse NEMORL_PORTS, such as `20000-29999`. Raises `OptionError`."""
    text = environment.get(PORTS) or DEFAULT_PORTS
    first, _, last = text.partition("-")
    numbers = [int(word) for word in (first, last) if word.strip().isdecimal()]
    if len(numbers) != 2 or not 1024 <= numbers[0] < numbers[1] <= 65535:
        raise OptionError(
            f"{PORTS} = {text}: expected the first and the last port, from 1024 to 65535, such as "
            f"{DEFAULT_PORTS}"
        )
    return range(numbers[0], numbers[1] + 1)


def block_size(cores: int) -> int:
    """Ports of a node: Ray's own, and one for each worker process, idle ones included."""
    return NUM_FIXED_PORTS + 40 + 2 * cores


def free_blocks(ports: range, size: int, job: str) -> tuple[int, ...]:
    """First ports of the blocks of this machine in which nothing listens, in the order of this job."""
    free: list[int] = []
    blocks = len(ports) // size
    offset = int("".join(filter(str.isdecimal, job)) or 0)
    for i in range(blocks):
        first = ports[0] + (offset + i) % blocks * size
        if all(_is_free(port) for port in range(first, first + size)):
            free.append(first)
            if len(free) == MAX_BLOCKS:
                break
    return tuple(free)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection may linger
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def assign_ports(nodes: Mapping[str, NodeInfo]) -> dict[str, Ports]:
    """Assign a block to each node, without overlap on a shared machine. Raises `SlurmError`."""
    taken: dict[str, list[range]] = {}
    assigned: dict[str, Ports] = {}
    for name, info in nodes.items():
        others = taken.setdefault(info.host, [])
        candidates = (range(first, first + info.block_size) for first in info.free_blocks)
        block = next(
            (b for b in candidates if not any(b.start < o.stop and o.start < b.stop for o in others)), None
        )
        if block is None:
            raise SlurmError(
                f"{PORTS}: {name} has no {info.block_size} consecutive free ports in the range. Set a larger "
                "range, or another one."
            )
        others.append(block)
        assigned[name] = Ports(block[0], block[-1])
    return assigned
