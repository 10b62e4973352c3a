"""Which ports the processes of a job listen on: a block of a range for each node.

Jobs begin their search for a free block at different places, by their ids, so that two that start at once on
one machine do not want the same one. Every node looks for itself which blocks are free; the head chooses, so
that nodes that share a machine get different ones.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .errors import OptionError, SlurmError

VARIABLE = "NEMORL_PORTS"
DEFAULT = "20000-29999"  # below the ports that Linux hands out by itself, 32768 and on
FIXED = 10  # of a block; the rest is for Ray's workers
CHOICES = 32  # free blocks that a node names; as many nodes can share a machine


@dataclass(frozen=True)
class Ports:
    """The block of one node, and what its parts are for."""

    first: int
    last: int

    @property
    def gcs(self) -> int:
        """Ray's address, on the head."""
        return self.first

    @property
    def control(self) -> int:
        """Where the head's launcher listens to the others."""
        return self.first + 1

    @property
    def ray_options(self) -> dict[str, int]:
        """`ray start`'s options for a node."""
        names = (
            "node-manager-port",
            "object-manager-port",
            "metrics-export-port",
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
            "ray-client-server-port",  # Ray 2.60 cannot be told to start none: 0 is refused
        )
        fixed = {name: self.first + 2 + i for i, name in enumerate(names)}
        return fixed | {"min-worker-port": self.first + FIXED, "max-worker-port": self.last}


def read_range(text: str) -> range:
    """`20000-29999` as a range. Raises `OptionError`."""
    first, dash, last = text.partition("-")
    numbers = [int(word) for word in (first, last) if word.strip().isdecimal()]
    if not dash or len(numbers) != 2 or not 1024 <= numbers[0] < numbers[1] <= 65535:
        raise OptionError(
            f"{VARIABLE} = {text}: name the first and the last port, from 1024 to 65535, such as {DEFAULT}"
        )
    return range(numbers[0], numbers[1] + 1)


def block_size(cores: int) -> int:
    """Ports of a node: Ray's own, and one for each worker, those that wait included."""
    return FIXED + 40 + 2 * cores


def free_blocks(ports: range, size: int, job: str, *, limit: int = CHOICES) -> list[int]:
    """First ports of blocks on this machine in which nothing listens, the job's own preference first."""
    free: list[int] = []
    for first in _in_order(ports, size, job):
        if all(_free(port) for port in range(first, first + size)):
            free.append(first)
            if len(free) == limit:
                break
    return free


def assign(
    free: Mapping[str, Sequence[int]], sizes: Mapping[str, int], hosts: Mapping[str, str], ports: str
) -> dict[str, Ports]:
    """A block for each node; nodes of one host get blocks that do not overlap. Raises `SlurmError`.

    `free`, `sizes` and `hosts` are of each node, by its name; `ports` is the range, as it was given.
    """
    taken: dict[str, list[range]] = {}
    found: dict[str, Ports] = {}
    for node, blocks in free.items():
        others = taken.setdefault(hosts[node], [])
        candidates = [range(first, first + sizes[node]) for first in blocks]
        block = next((b for b in candidates if not any(_overlap(b, other) for other in others)), None)
        if block is None:
            raise SlurmError(
                f"{VARIABLE} = {ports}: on {node} there are no {sizes[node]} ports in a row that nothing "
                "else uses. Name a larger range, or another one."
            )
        others.append(block)
        found[node] = Ports(block[0], block[-1])
    return found


def _in_order(ports: range, size: int, job: str) -> Iterator[int]:
    blocks = len(ports) // size
    digits = "".join(character for character in job if character.isdecimal())
    start = int(digits or 0) % max(1, blocks)
    for i in range(blocks):
        yield ports[0] + (start + i) % blocks * size


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection may still linger
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop
