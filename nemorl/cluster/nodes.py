"""The machines of the cluster as Ray knows them."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ray

from .errors import ClusterUnavailable

LOOPBACK = "127.0.0.1"
NODE_LABEL = "ray.io/node-id"  # which every node has
DOMAIN_LABEL = "ray.io/gpu-domain"  # of nodes whose GPUs are joined by NVLink
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Node:
    """A machine of the cluster; a machine may be several for tests."""

    id: str
    name: str  # for people
    address: str
    cores: int  # Ray's logical CPUs
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}: {self.cores} CPU, {self.gpus} GPU"


@dataclass(frozen=True)
class Home:
    """Where a worker of a run over several nodes lives, and who else of the run does."""

    node: str  # Ray's id
    name: str
    tenants: tuple[tuple[str, tuple[int, ...]], ...]  # groups with their ranks

    def is_lost(self) -> bool:
        """Whether the node takes part no more."""
        return all(node.id != self.node for node in alive_nodes())

    def __str__(self) -> str:
        return " and ".join(
            f"{group} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for group, ranks in self.tenants
        )


def alive_nodes() -> list[Node]:
    """Those that take part now, by name."""
    return sorted((_node(e) for e in ray.nodes() if e["Alive"]), key=lambda node: (node.name, node.id))


def driver_node() -> str:
    """The id of the one on which this process runs."""
    return str(ray.get_runtime_context().get_node_id())


async def wait_for_nodes(count: int, seconds: float) -> None:
    """Return when so many nodes take part. Raises `ClusterUnavailable` when they do not in this time."""
    end = time.monotonic() + seconds
    while len(there := alive_nodes()) < count:
        if time.monotonic() >= end:
            names = ", ".join(node.name for node in there)
            raise ClusterUnavailable(
                f"cluster.num_nodes is {count}, and after {seconds:g} s (cluster.deadlines.start) the Ray "
                f"cluster has {len(there)} node{'s' * (len(there) != 1)} ({names}): look why `ray start` "
                "failed on the others, or set cluster.num_nodes to what is there"
            )
        await asyncio.sleep(min(_LOOK_SECONDS, max(0.0, end - time.monotonic())))


def shared_cores(nodes: Sequence[Node]) -> int:
    """Cores for each of the processes that live on these nodes, one a process, if they share them evenly."""
    processes = Counter(node.id for node in nodes)
    return max(1, min(node.cores // processes[node.id] for node in nodes))


def labels_in_use(nodes: Sequence[Node]) -> str:
    """What labels the nodes have, for messages; those that Ray gives by itself are left out."""
    told = [
        f"{node.name} ({', '.join(f'{k}={v}' for k, v in sorted(_own_labels(node).items())) or 'none'})"
        for node in nodes
    ]
    return ", ".join(told)


def _own_labels(node: Node) -> dict[str, str]:
    return {key: value for key, value in node.labels.items() if key != NODE_LABEL}


def _node(entry: Mapping[str, object]) -> Node:
    """One of `ray.nodes()`. Ray names a node by its address where nobody has named it."""
    address, named = str(entry["NodeManagerAddress"]), str(entry.get("NodeName", ""))
    resources, labels = entry["Resources"], entry.get("Labels")
    assert isinstance(resources, Mapping)
    return Node(
        str(entry["NodeID"]),
        str(entry["NodeManagerHostname"]) if named in ("", address) else named,
        address,
        int(resources.get("CPU", 0)),
        int(resources.get("GPU", 0)),
        labels if isinstance(labels, Mapping) else {},
    )
