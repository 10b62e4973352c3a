"""Nodes of the cluster, as Ray reports them."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import ray

from .errors import ClusterUnavailable

NODE_LABEL = "ray.io/node-id"  # set by Ray on every node
DOMAIN_LABEL = "ray.io/gpu-domain"  # of nodes whose GPUs are joined by NVLink
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Node:
    """A node of the cluster; in tests one machine may be several nodes."""

    id: str
    name: str  # for messages
    address: str
    cores: int  # logical CPUs of Ray
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}: {self.cores} CPU, {self.gpus} GPU"


@dataclass(frozen=True)
class Home:
    """Node of a worker in a run over several nodes, with all of the run's ranks on it."""

    node: str  # Ray's ID
    name: str
    tenants: tuple[tuple[str, tuple[int, ...]], ...]  # groups with their ranks

    def is_lost(self) -> bool:
        return bool(lost_nodes({self.node}))

    def __str__(self) -> str:
        return listed(self.tenants)


def listed(tenants: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Groups with their ranks, for messages."""
    texts = ((group, "s" * (len(ranks) > 1), ", ".join(map(str, ranks))) for group, ranks in tenants)
    return " and ".join(f"{group} rank{plural} {ranks}" for group, plural, ranks in texts)


def alive_nodes() -> list[Node]:
    nodes = []
    for entry in (entry for entry in ray.nodes() if entry["Alive"]):
        address, name, resources = entry["NodeManagerAddress"], entry.get("NodeName", ""), entry["Resources"]
        if name in ("", address):  # Ray uses the address as the name of a node without one
            name = entry["NodeManagerHostname"]
        cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        nodes.append(Node(entry["NodeID"], name, address, cores, gpus, entry.get("Labels") or {}))
    return sorted(nodes, key=lambda node: (node.name, node.id))


def lost_nodes(nodes: Set[str]) -> Set[str]:
    """Those of these nodes, given by ID, that are lost."""
    return nodes - {node.id for node in alive_nodes()} if nodes else nodes


def draining_nodes() -> set[str]:
    """IDs of nodes that will be taken away, such as those of a pre-emption."""
    return set(ray._private.state.state.get_draining_nodes())


def driver_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


async def wait_for_nodes(count: int, seconds: float) -> None:
    """Wait until the cluster has `count` nodes. Raises `ClusterUnavailable` after `seconds`."""
    end = time.monotonic() + seconds
    while len(nodes := alive_nodes()) < count:
        if time.monotonic() >= end:
            names = ", ".join(node.name for node in nodes)
            found = f"{len(nodes)} node{'s' * (len(nodes) != 1)} ({names})"
            problem = f"after {seconds:g} s (cluster.deadlines.start) the Ray cluster has {found}"
            fix = "find out why `ray start` failed on the others, or set cluster.num_nodes to what is there"
            raise ClusterUnavailable(f"cluster.num_nodes is {count}, and {problem}: {fix}")
        await asyncio.sleep(min(_POLL_SECONDS, max(0.0, end - time.monotonic())))


def labels_in_use(nodes: Sequence[Node]) -> str:
    described = []
    for node in nodes:
        labels = (f"{key}={value}" for key, value in sorted(node.labels.items()) if key != NODE_LABEL)
        described.append(f"{node.name} ({', '.join(labels) or 'none'})")
    return ", ".join(described)
