"""Where workers run: on which machine of the cluster, in which of the places that were reserved.

Which processes an experiment wants: how many of each group, with which resources, on which nodes.

Getting the places: all workers of a run at once, or none, and why they do not fit.
"""

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of

from .errors import PlacementFailed
from .nodes import (
    DOMAIN_LABEL,
    LOOPBACK,
    NODE_LABEL,
    Home,
    Node,
    alive_nodes,
    driver_node,
    labels_in_use,
    shared_cores,
)


@dataclass(frozen=True)
class WorkerRequest:
    """Processes of one group. Each takes one of Ray's logical CPUs, whatever the number of its threads."""

    group: str
    count: int
    gpus: int = 0  # that each process works on
    for_children: bool = False  # the GPUs are for actors that each process starts in its own place
    beside: str | None = None  # a group in the places of whose ranks, one for each GPU, they live, if it runs
    fractional_gpu: bool = (
        False  # of what is beside another: Ray lends it a part of the GPU; else it is told its names
    )
    labels: Mapping[str, str] = field(default_factory=dict)  # of its nodes, as Ray's label selectors have it
    topology: str | None = None  # a label of which all its nodes must have the same value
    at_driver: bool = False  # on the driver's node

    @property
    def bundle(self) -> dict[str, float]:
        """Ray's resources of one process, and of its place if it has one of its own."""
        return {"CPU": 1.0, "GPU": float(self.gpus)} if self.gpus else {"CPU": 1.0}

    def neighbours(self, rank: int) -> range:
        """The ranks that it is beside."""
        size = self.gpus or 1
        return range(rank * size, (rank + 1) * size)

    def __str__(self) -> str:
        name = f"{self.count} {self.group} worker{'s' * (self.count > 1)}"
        each = "1 CPU" + (f" and {self.gpus} GPU" if self.gpus else "") + " each"
        where = [f"in places of {self.beside} workers"] if self.beside else []
        where += [f"{key}={value}" for key, value in self.labels.items()]
        where += [f"all with the same {self.topology}"] if self.topology else []
        return f"{name} ({', '.join([each, *where])})"


def worker_requests(experiment: Experiment) -> tuple[WorkerRequest, ...]:
    """The processes of an experiment. Ranks of models and of engines get a GPU each, if any.

    Those of generation are not there where the policy samples by itself. What shares the policy's devices is
    beside it: models rank by rank, an engine of n ranks beside n ranks of the policy.
    """
    cluster, generation = experiment.cluster, experiment.generation
    gpus = 1 if cluster.gpus_per_node else 0
    policy, *others = models_of(experiment)
    models = [
        WorkerRequest(
            model.name,
            model.config.layout.world_size,
            gpus,
            beside="policy" if model.on_policy_devices else None,
            fractional_gpu=model.on_policy_devices,
        )
        for model in others
    ]
    engines = WorkerRequest(
        "generation",
        generation.replicas,
        gpus * generation.ranks_per_replica,
        for_children=generation.workers_hold_gpus,
        beside="policy" if generation.shares_devices and gpus else None,
    )
    requests = (
        WorkerRequest("policy", policy.config.layout.world_size, gpus),
        *models,
        *([engines] if generation.has_engines else []),
        WorkerRequest("rollout", cluster.rollout_workers),
        # Its address is one of the driver's machine.
        *([WorkerRequest("endpoint", 1, at_driver=True)] if generation.endpoint is not None else []),
    )
    return tuple(
        replace(r, labels=cluster.labels.get(r.group, {}), topology=cluster.topology.get(r.group))
        for r in requests
    )


def with_places(requests: Sequence[WorkerRequest]) -> list[WorkerRequest]:
    """Those that are in nobody else's."""
    there = {request.group for request in requests}
    return [request for request in requests if request.beside not in there]


def wanted_bundles(requests: Sequence[WorkerRequest]) -> list[dict[str, float]]:
    """What to reserve, group by group. What is beside others has no bundles, but a CPU in each of theirs."""
    beside = Counter(request.beside for request in requests)
    return [
        {**request.bundle, "CPU": request.bundle["CPU"] + beside[request.group]}
        for request in with_places(requests)
        for _ in range(request.count)
    ]


def own_gpus() -> tuple[str, ...]:
    """The GPUs of the worker that calls this, as CUDA_VISIBLE_DEVICES names them."""
    return tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])


@dataclass(frozen=True)
class Placement:
    """Reserved places for all workers of a run."""

    places: Mapping[str, PlacementGroup]  # by worker group, where its bundles are
    bundles: Mapping[str, tuple[int, ...]]  # by worker group, the bundle of each rank
    requests: Mapping[str, WorkerRequest]
    nodes: Mapping[str, tuple[Node, ...]]  # by worker group, of each rank
    driver: str  # the id of the driver's node
    environment: Mapping[str, str] = field(default_factory=dict)  # that every worker gets

    def beside(self, group: str) -> tuple[range, ...]:
        """For each rank of a group the ranks of another on whose GPUs it works; nothing if it has its own."""
        request = self.requests[group]
        if request.beside not in self.requests:
            return ()
        return tuple(request.neighbours(rank) for rank in range(request.count))

    def on_node_of(self, group: str, rank: int, other: str) -> tuple[int, ...]:
        """The ranks of another group that live on the node of this one."""
        here = self.nodes[group][rank].id
        return tuple(place for place, node in enumerate(self.nodes[other]) if node.id == here)

    def home(self, group: str, rank: int) -> Home | None:
        """Where a rank lives; None in a run on one node."""
        if len({node.id for nodes in self.nodes.values() for node in nodes}) <= 1:
            return None
        node = self.nodes[group][rank]
        tenants = [(name, self.on_node_of(group, rank, name)) for name in self.nodes]
        return Home(node.id, node.name, tuple((name, ranks) for name, ranks in tenants if ranks))

    @property
    def described(self) -> dict[str, str]:
        """Who lives on which node, for the head of a run's log; nothing of a run on one node."""
        homes = [self.home(group, rank) for group in self.nodes for rank in range(len(self.nodes[group]))]
        return {f"node {home.name}": str(home) for home in homes if home is not None}

    def threads(self, configured: int | None, *groups: str) -> int:
        """CPU threads of each process of groups that work at the same time.

        As configured, or the cores of the fullest node shared evenly.
        """
        return configured or shared_cores([node for group in groups for node in self.nodes[group]])

    def driver_address(self, *groups: str) -> str:
        """Where the driver listens for these groups: loopback, unless some live on other nodes than it."""
        there = {node.id for group in groups for node in self.nodes[group]}
        return LOOPBACK if there <= {self.driver} else str(ray.util.get_node_ip_address())

    def options(self, group: str, rank: int) -> dict[str, Any]:
        """Ray's options for the actor of one rank."""
        strategy = PlacementGroupSchedulingStrategy(
            self.places[group], placement_group_bundle_index=self.bundles[group][rank]
        )
        return {"num_cpus": 1, "num_gpus": self._gpus(self.requests[group]), "scheduling_strategy": strategy}

    def _gpus(self, request: WorkerRequest) -> float:
        """What Ray gives a process: a device that is lent to several goes to them by fractions of it."""
        beside = request.beside in self.requests
        if request.for_children or (beside and not request.fractional_gpu):
            return 0
        lender = request.beside if beside else request.group
        borrowers = sum(other.fractional_gpu and other.beside == lender for other in self.requests.values())
        return request.gpus / (1 + borrowers)

    def release(self) -> None:
        """Give the places back; workers that still live there are ended."""
        for place in {place.id: place for place in self.places.values()}.values():
            remove_placement_group(place)


def assigned_bundles(
    requests: Sequence[WorkerRequest], node_of: Mapping[int, Any]
) -> dict[str, tuple[int, ...]]:
    """Bundle of each rank, so that consecutive ranks (tensor-parallel neighbours) share a machine.

    A process beside others is in the bundle of the first of them. `node_of` says of each bundle which machine
    it is on, by anything that has an order: ranks fill the machines in it. Raises `PlacementFailed` if they
    are on several.
    """
    bundles: dict[str, tuple[int, ...]] = {}
    first = 0
    for request in with_places(requests):
        own = range(first, first + request.count)
        bundles[request.group] = tuple(sorted(own, key=lambda bundle: (node_of[bundle], bundle)))
        first += request.count
    for request in requests:
        if request.beside in bundles:
            theirs = bundles[request.beside]
            places = [[theirs[n] for n in request.neighbours(rank)] for rank in range(request.count)]
            for rank, local_positions in enumerate(places):
                if len({node_of[bundle] for bundle in local_positions}) > 1:
                    raise _divided(request, rank)
            bundles[request.group] = tuple(local_positions[0] for local_positions in places)
    return bundles


def _divided(request: WorkerRequest, rank: int) -> PlacementFailed:
    ranks = request.neighbours(rank)
    return PlacementFailed(
        f"{request.group} rank {rank} uses the GPUs of {request.beside} ranks {ranks[0]} to {ranks[-1]}, and "
        "these are on several machines: take engines of fewer ranks, or set cluster.placement to STRICT_PACK."
    )


_WAIT_SECONDS = 1.0  # at most this long does the thread of a cancelled wait live on
_PLAIN = re.compile(r"[\w./-]*")  # a label's value, and none of the operators that selectors have


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


async def reserve(
    requests: Sequence[WorkerRequest],
    *,
    strategy: str,
    deadline_seconds: float,
    can_grow: bool,
    environment: Mapping[str, str],
) -> Placement:
    """Reserve places for all workers at once, or none.

    `strategy` is one of Ray's. A cluster that cannot grow is this machine alone, and is refused at once when
    it is too small as a whole; otherwise nodes may join until the deadline. A group with a topology has a
    reservation of its own, since it binds all that is in it. Raises `PlacementFailed`.
    """
    if not can_grow and (lacking := _lacking(requests)):
        raise _failure(requests, strategy, f"{lacking} more than all of it")
    if unknown := _unknown_label(requests):
        raise _failure(requests, strategy, f"no node has {unknown}")
    parts = [part for part in _parts(requests) if part]
    groups: list[PlacementGroup] = []
    try:
        groups += [_placed(part, strategy) for part in parts]
        if not await _ready(groups, deadline_seconds):
            raise _failure(requests, strategy, f"not possible within {deadline_seconds:g} s")
        nodes = {node.id: node for node in alive_nodes()}
        if not can_grow:  # Ray was told of as many CPUs as there are workers
            nodes = {name: replace(node, cores=available_cores()) for name, node in nodes.items()}
        return _placement(parts, groups, nodes, environment)
    except BaseException:  # also when the wait was cancelled
        for group in groups:
            remove_placement_group(group)
        raise


def _parts(requests: Sequence[WorkerRequest]) -> Iterator[list[WorkerRequest]]:
    """What is reserved together: every group with a topology, with what is beside it; then all the others."""
    apart = [request for request in with_places(requests) if request.topology is not None]
    for request in apart:
        yield [request, *(other for other in requests if other.beside == request.group)]
    names = {request.group for request in apart}
    yield [r for r in requests if r.group not in names and r.beside not in names]


def _placed(part: Sequence[WorkerRequest], strategy: str) -> PlacementGroup:
    selectors = [_selector(request) for request in with_places(part) for _ in range(request.count)]
    topology = part[0].topology
    where: dict[str, Any] = {"strategy": strategy}
    if topology is not None:
        where = {"topology_strategy": {topology: "STRICT_PACK", NODE_LABEL: strategy}}
    try:
        return placement_group(
            wanted_bundles(part), bundle_label_selector=selectors if any(selectors) else None, **where
        )
    except ValueError as error:  # Ray's own rules for labels
        groups = ", ".join(request.group for request in part)
        raise PlacementFailed(f"cluster.labels and cluster.topology of {groups}: {error}") from error


def _selector(request: WorkerRequest) -> dict[str, str]:
    return {**request.labels, **({NODE_LABEL: driver_node()} if request.at_driver else {})}


async def _ready(groups: Sequence[PlacementGroup], seconds: float) -> bool:
    """Whether the places are there before the deadline. Ray's wait blocks, so a thread waits, bit by bit."""
    end, missing = time.monotonic() + seconds, list(groups)
    while missing and (left := end - time.monotonic()) > 0:
        if await asyncio.to_thread(missing[0].wait, min(_WAIT_SECONDS, left)):
            missing.pop(0)
    return not missing


def _placement(
    parts: Sequence[Sequence[WorkerRequest]],
    groups: Sequence[PlacementGroup],
    nodes: Mapping[str, Node],
    environment: Mapping[str, str],
) -> Placement:
    """Which rank is where. Ranks fill the nodes of one domain of fast links before those of the next."""
    places, bundles, homes = {}, {}, {}
    for part, group in zip(parts, groups, strict=True):
        found: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
        domain = part[0].topology or DOMAIN_LABEL
        order = {
            bundle: (nodes[node].labels.get(domain, ""), nodes[node].name, node)
            for bundle, node in found.items()
        }
        for name, own in assigned_bundles(part, order).items():
            places[name], bundles[name] = group, own
            homes[name] = tuple(nodes[found[bundle]] for bundle in own)
    requests = {request.group: request for part in parts for request in part}
    return Placement(places, bundles, requests, homes, driver_node(), environment)


def _lacking(requests: Sequence[WorkerRequest]) -> str:
    has = ray.cluster_resources()
    wanted = wanted_bundles(requests)
    cpus = sum(bundle["CPU"] for bundle in wanted) - has.get("CPU", 0.0)
    gpus = sum(bundle.get("GPU", 0.0) for bundle in wanted) - has.get("GPU", 0.0)
    return " and ".join(f"{lack:g} {name}" for lack, name in ((cpus, "CPU"), (gpus, "GPU")) if lack > 0)


def _unknown_label(requests: Sequence[WorkerRequest]) -> str | None:
    """A label that is asked for and that no node has, if any; selectors with operators are left to Ray."""
    nodes = alive_nodes()
    for request in requests:
        for label, value in request.labels.items():
            if _PLAIN.fullmatch(value) and all(node.labels.get(label) != value for node in nodes):
                return f"the label {label}={value}, which cluster.labels.{request.group} wants"
        if request.topology is not None and all(request.topology not in node.labels for node in nodes):
            return f"the label {request.topology}, which cluster.topology.{request.group} wants"
    return None


def _failure(requests: Sequence[WorkerRequest], strategy: str, verdict: str) -> PlacementFailed:
    nodes, free = alive_nodes(), ray.available_resources()
    labelled = any(request.labels or request.topology for request in requests)
    return PlacementFailed(
        f"The workers do not fit into the cluster ({verdict}). Asked for, with strategy {strategy}: "
        f"{', '.join(map(str, requests))}. The cluster has {len(nodes)} node{'s' * (len(nodes) != 1)} "
        f"({'; '.join(map(str, nodes))}), of which {free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU "
        "are free. "
        + (f"Labels of the nodes are: {labels_in_use(nodes)}. Mend cluster.labels. " if labelled else "")
        + "Ask for fewer workers (policy.layout, generation.replicas, cluster.rollout_workers), set "
        "cluster.gpus_per_node to what is there, or join a larger cluster with RAY_ADDRESS."
    )
