"""Placement of workers on the nodes of the cluster, over Ray's placement groups.

`worker_requests` ─processes of each group─▶ `reserve` ─bundles for all, or none─▶ `Placement` of each rank
"""

import asyncio
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from nemorl.config.experiment import Experiment
from nemorl.config.facts import environment_actors, models_of
from nemorl.config.generation import LOOPBACK

from .errors import NodeNotReplaced, PlacementFailed
from .nodes import (
    DOMAIN_LABEL,
    NODE_LABEL,
    Home,
    Node,
    alive_nodes,
    driver_node,
    labels_in_use,
    listed,
)

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02  # doubled with every poll up to the longest
_LONGEST_POLL_SECONDS = 1.0
MAX_LOCAL_SECONDS = 30.0  # until an extra rank has a place on a machine that cannot grow
_PLAIN = re.compile(r"[\w./-]*")  # a label's value without selector operators


@dataclass(frozen=True)
class WorkerRequest:
    """Processes of one group. Each takes one of Ray's logical CPUs, whatever the number of its threads."""

    group: str
    count: int
    gpus: int = 0  # that each process works on
    for_children: bool = False  # the GPUs are for actors that each process starts in its own bundle
    host_group: str | None = None  # a group whose bundles they share if it runs: one host rank for each GPU
    # With a host group: True if Ray assigns a fraction of the GPU, False if the process gets the GPU names.
    fractional_gpu: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)  # of its nodes, in Ray's label selector syntax
    topology: str | None = None  # a label that must have the same value on all its nodes
    at_driver: bool = False  # on the driver's node

    def host_ranks(self, rank: int) -> range:
        """Ranks of the host group whose bundles and GPUs a rank shares."""
        size = self.gpus or 1
        return range(rank * size, (rank + 1) * size)

    def __str__(self) -> str:
        name = f"{self.count} {self.group} worker{'s' * (self.count > 1)}"
        each = "1 CPU" + (f" and {self.gpus} GPU" if self.gpus else "") + " each"
        where = [f"in places of {self.host_group} workers"] if self.host_group else []
        where += [f"{key}={value}" for key, value in self.labels.items()]
        where += [f"all with the same {self.topology}"] if self.topology else []
        return f"{name} ({', '.join([each, *where])})"


def worker_requests(experiment: Experiment) -> tuple[WorkerRequest, ...]:
    """Processes of an experiment. Each rank of a model or an engine gets one GPU if the nodes have GPUs.

    Groups that share the policy's devices have it as their host group: models rank by rank, an engine of n
    ranks with n ranks of the policy.
    """
    cluster, generation = experiment.cluster, experiment.generation
    gpus = 1 if cluster.gpus_per_node else 0
    requests = []
    for model in models_of(experiment):
        request = WorkerRequest(model.name, model.config.layout.world_size, gpus)
        if model.on_policy_devices:
            request = replace(request, host_group="policy", fractional_gpu=True)
        requests.append(request)
    if generation.has_engines:
        host = "policy" if generation.shares_devices and gpus else None
        ranks, holds = generation.ranks_per_replica, generation.workers_hold_gpus
        requests.append(WorkerRequest("generation", generation.replicas, gpus * ranks, holds, host))
    requests.append(WorkerRequest("rollout", cluster.rollout_workers))
    requests += [
        WorkerRequest(actors.group, actors.placement.num_actors)
        for actors in environment_actors(experiment.env)
    ]
    if generation.endpoint is not None:  # its address belongs to the driver's node
        requests.append(WorkerRequest("endpoint", 1, at_driver=True))
    labels, topology = cluster.labels, cluster.topology
    return tuple(replace(r, labels=labels.get(r.group, {}), topology=topology.get(r.group)) for r in requests)


def with_places(requests: Sequence[WorkerRequest]) -> list[WorkerRequest]:
    groups = {request.group for request in requests}
    return [request for request in requests if request.host_group not in groups]


def required_bundles(requests: Sequence[WorkerRequest]) -> list[dict[str, float]]:
    """Bundles to reserve, group by group. A hosted group adds a CPU to each bundle of its host group."""
    hosted = Counter(request.host_group for request in requests)
    bundles: list[dict[str, float]] = []
    for request in with_places(requests):
        gpus = {"GPU": float(request.gpus)} if request.gpus else {}
        bundles += [{"CPU": 1.0 + hosted[request.group], **gpus} for _ in range(request.count)]
    return bundles


@dataclass
class Placement:
    """Reserved bundles and nodes of all workers of a run. The keys of mappings are worker groups.

    Ray moves the bundles of a lost node to others as soon as these have room; `follow` takes that over.
    """

    places: Mapping[str, PlacementGroup]
    bundles: Mapping[str, tuple[int, ...]]  # of each rank
    requests: Mapping[str, WorkerRequest]
    nodes: Mapping[str, tuple[Node, ...]]  # of each rank; of one whose node is lost, that node
    driver: str  # ID of the driver's node
    environment: Mapping[str, str] = field(default_factory=dict)  # environment variables of every worker
    can_grow: bool = False  # nodes may join the cluster
    lost: set[str] = field(default_factory=set)  # IDs of nodes whose ranks are now elsewhere

    def host_ranks(self, group: str) -> tuple[range, ...]:
        """Ranks of the host group whose GPUs each rank of a group uses; empty if it is not hosted."""
        request = self.requests[group]
        if request.host_group not in self.requests:
            return ()
        return tuple(request.host_ranks(rank) for rank in range(request.count))

    def on_node_of(self, group: str, rank: int, other: str) -> tuple[int, ...]:
        node_id = self.nodes[group][rank].id
        return tuple(index for index, node in enumerate(self.nodes[other]) if node.id == node_id)

    def home(self, group: str, rank: int) -> Home | None:
        """Node of a rank and the ranks on it; None in a run on the driver's node alone."""
        if {node.id for nodes in self.nodes.values() for node in nodes} <= {self.driver}:
            return None
        node = self.nodes[group][rank]
        tenants = [(name, self.on_node_of(group, rank, name)) for name in self.nodes]
        return Home(node.id, node.name, tuple((name, ranks) for name, ranks in tenants if ranks))

    @property
    def described(self) -> dict[str, str]:
        """Ranks on each node; empty in a run on the driver's node alone."""
        homes = [self.home(group, rank) for group in self.nodes for rank in range(len(self.nodes[group]))]
        return {f"node {home.name}": str(home) for home in homes if home is not None}

    def threads(self, configured: int | None, *groups: str) -> int:
        """CPU threads of each process: as configured, else an equal share of the fullest node's cores."""
        if configured is not None:
            return configured
        nodes = [node for group in groups for node in self.nodes[group]]
        processes = Counter(node.id for node in nodes)
        return max(1, min(node.cores // processes[node.id] for node in nodes))

    def driver_address(self, *groups: str) -> str:
        """Address on which the driver listens for these groups."""
        node_ids = {node.id for group in groups for node in self.nodes[group]}
        return LOOPBACK if node_ids <= {self.driver} else str(ray.util.get_node_ip_address())

    def with_one_on_each(self, group: str, nodes: Sequence[Node]) -> "Placement":
        """Also a process of `group` on each of these nodes, for which nothing is reserved."""
        return replace(self, nodes={**self.nodes, group: tuple(nodes)})

    def options(self, group: str, rank: int) -> dict[str, Any]:
        """Ray options for the actor of one rank; processes that share a device get equal fractions of it."""
        if group not in self.requests:  # of `with_one_on_each`
            node = NodeAffinitySchedulingStrategy(self.nodes[group][rank].id, soft=False)
            return {"num_cpus": 0, "scheduling_strategy": node}
        request = self.requests[group]
        is_hosted = request.host_group in self.requests
        host = request.host_group if is_hosted else group
        guests = sum(other.fractional_gpu and other.host_group == host for other in self.requests.values())
        has_own_gpus = not request.for_children and (not is_hosted or request.fractional_gpu)
        strategy = PlacementGroupSchedulingStrategy(self.places[group], self.bundles[group][rank])
        gpus = request.gpus / (1 + guests) if has_own_gpus else 0
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}

    def follow(self, group: str) -> "Displaced | None":
        """Give ranks whose node is lost the places to which Ray has moved their bundles.

        Returns those that have none yet, of all groups that share the reservation of this one: Ray moves all
        bundles of a reservation or none. Other ranks keep their bundles.
        """
        place, alive = self.places[group], {node.id: node for node in alive_nodes()}
        shared = [request for name, request in self.requests.items() if self.places[name] is place]
        lost: dict[str, tuple[int, ...]] = {}
        for name in (request.group for request in shared):
            if ranks := tuple(r for r, node in enumerate(self.nodes[name]) if node.id not in alive):
                lost[name] = ranks
        if not lost:
            return None
        table = placement_group_table(place)
        at = {bundle: alive[node] for bundle, node in table["bundles_to_node_id"].items() if node in alive}
        if without := {bundle for r in shared for bundle in self.bundles[r.group]} - at.keys():
            needed = sum((Counter(table["bundles"][bundle]) for bundle in without), Counter[str]())
            names = {self.nodes[name][rank].name for name in lost for rank in lost[name]}
            return Displaced(tuple(lost.items()), dict(needed), tuple(sorted(names)))
        order, bundles = _order(at, shared), dict(self.bundles)
        for name in (request.group for request in with_places(shared)):
            ranks = lost.get(name, ())
            moved = [bundles[name][rank] for rank in ranks]
            new = dict(zip(ranks, sorted(moved, key=lambda bundle: (order[bundle], bundle)), strict=True))
            bundles[name] = tuple(new.get(rank, bundle) for rank, bundle in enumerate(bundles[name]))
        self.bundles = bundles | _hosted_bundles(shared, bundles, order)
        self.lost |= {self.nodes[name][rank].id for name, ranks in lost.items() for rank in ranks}
        found = {r.group: tuple(at[bundle] for bundle in self.bundles[r.group]) for r in shared}
        self.nodes = {**self.nodes, **found}
        return None

    def shares_places(self, group: str) -> bool:
        """True if other processes have places with those of a group."""
        host = self.requests[group].host_group
        return host in self.requests or any(r.host_group == group for r in self.requests.values())

    def ranks_left(self, group: str) -> list[int]:
        """Ranks whose node is not lost."""
        alive = {node.id for node in alive_nodes()}
        return [rank for rank, node in enumerate(self.nodes[group]) if node.id in alive]

    def shrink(self, group: str, count: int) -> None:
        """Leave a group `count` ranks, on nodes that are not lost, with new numbers."""
        left = self.ranks_left(group)
        self.lost |= {node.id for rank, node in enumerate(self.nodes[group]) if rank not in left}
        kept = left[:count]
        self.requests = {**self.requests, group: replace(self.requests[group], count=count)}
        self.bundles = {**self.bundles, group: tuple(self.bundles[group][rank] for rank in kept)}
        self.nodes = {**self.nodes, group: tuple(self.nodes[group][rank] for rank in kept)}

    def release(self) -> None:
        """Remove the reservations; Ray kills workers that still run in them."""
        for place in {place.id: place for place in self.places.values()}.values():
            remove_placement_group(place)


@dataclass(frozen=True)
class Displaced:
    """Ranks of lost nodes that have no place."""

    ranks: tuple[tuple[str, tuple[int, ...]], ...]  # by group
    needed: Mapping[str, float]  # what their bundles take, by resource
    nodes: tuple[str, ...]  # names of the lost ones

    def of(self, group: str) -> set[int]:
        return {rank for name, ranks in self.ranks if name == group for rank in ranks}

    def __str__(self) -> str:
        needed = " and ".join(f"{number:g} {name}" for name, number in sorted(self.needed.items()))
        return f"{listed(self.ranks)} of {' and '.join(self.nodes)} ({needed})"


def assigned_bundles(
    requests: Sequence[WorkerRequest], node_of: Mapping[int, Any]
) -> dict[str, tuple[int, ...]]:
    """Assign a bundle to each rank so that consecutive (tensor-parallel) ranks share a machine.

    A hosted process gets the bundle of the first of its host ranks. `node_of` maps each bundle to a sortable
    value of its machine. Raises `PlacementFailed` if the host ranks of a process are on several machines.
    """
    bundles: dict[str, tuple[int, ...]] = {}
    first = 0
    for request in with_places(requests):
        own = range(first, first + request.count)
        bundles[request.group] = tuple(sorted(own, key=lambda bundle: (node_of[bundle], bundle)))
        first += request.count
    return bundles | _hosted_bundles(requests, bundles, node_of)


def _hosted_bundles(
    requests: Sequence[WorkerRequest], of_hosts: Mapping[str, tuple[int, ...]], node_of: Mapping[int, Any]
) -> dict[str, tuple[int, ...]]:
    bundles: dict[str, tuple[int, ...]] = {}
    groups = {request.group for request in requests}
    for request in requests:
        if request.host_group in groups:
            host_bundles = of_hosts[request.host_group]
            places = [[host_bundles[n] for n in request.host_ranks(rank)] for rank in range(request.count)]
            for rank, local_positions in enumerate(places):
                if len({node_of[bundle] for bundle in local_positions}) > 1:
                    ranks = request.host_ranks(rank)
                    hosts = f"{request.host_group} ranks {ranks[0]} to {ranks[-1]}"
                    problem = f"uses the GPUs of {hosts}, which are on several machines"
                    fix = "Use engines of fewer ranks or set cluster.placement to STRICT_PACK."
                    raise PlacementFailed(f"{request.group} rank {rank} {problem}. {fix}")
            bundles[request.group] = tuple(local_positions[0] for local_positions in places)
    return bundles


def _order(at: Mapping[int, Node], part: Sequence[WorkerRequest]) -> dict[int, tuple[str, str, str]]:
    """Sortable values of the nodes of bundles; ranks fill the nodes of a domain before those of the next."""
    domain = part[0].topology or DOMAIN_LABEL
    return {bundle: (node.labels.get(domain, ""), node.name, node.id) for bundle, node in at.items()}


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


async def reserve(
    requests: Sequence[WorkerRequest],
    *,
    strategy: str,
    deadline_seconds: float,
    can_grow: bool,
    environment: Mapping[str, str],
) -> Placement:
    """Reserve bundles for all workers at once, or none.

    A cluster that cannot grow is this machine alone and is refused immediately if its total is too small;
    otherwise nodes may join until the deadline, and without one nodes with other labels too. Raises
    `PlacementFailed`.
    """
    if not can_grow:
        _require_total(requests, strategy)
    if deadline_seconds < math.inf and (unknown := _unknown_label(requests)):
        raise _failure(requests, strategy, f"no node has {unknown}")
    # A topology applies to all bundles of a reservation: a group with one has its own, with those it hosts.
    apart = [request for request in with_places(requests) if request.topology is not None]
    parts = [[r, *(other for other in requests if other.host_group == r.group)] for r in apart]
    names = {request.group for request in apart}
    parts.append([r for r in requests if r.group not in names and r.host_group not in names])
    parts = [part for part in parts if part]
    groups: list[PlacementGroup] = []
    try:
        groups += [_placed(part, strategy) for part in parts]
        # Polled, because Ray's wait would occupy a thread for each reservation.
        end, missing, pause = time.monotonic() + deadline_seconds, groups.copy(), _POLL_SECONDS
        while missing:
            if (left := end - time.monotonic()) <= 0:
                raise _failure(requests, strategy, f"not possible within {deadline_seconds:g} s")
            table = await asyncio.to_thread(placement_group_table, missing[0])
            if table.get("state") == "CREATED":
                missing.pop(0)
            else:
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        nodes = {node.id: node for node in alive_nodes()}
        if not can_grow:  # Ray was started with as many CPUs as there are workers
            nodes = {name: replace(node, cores=available_cores()) for name, node in nodes.items()}
        places, bundles, rank_nodes = {}, {}, {}
        for part, group in zip(parts, groups, strict=True):
            node_ids: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
            order = _order({bundle: nodes[node] for bundle, node in node_ids.items()}, part)
            for name, own in assigned_bundles(part, order).items():
                places[name], bundles[name] = group, own
                rank_nodes[name] = tuple(nodes[node_ids[bundle]] for bundle in own)
        of_groups = {request.group: request for request in requests}
        return Placement(places, bundles, of_groups, rank_nodes, driver_node(), environment, can_grow)
    except BaseException:  # also when the wait was cancelled
        for group in groups:
            remove_placement_group(group)
        raise


@dataclass(frozen=True)
class Seat:
    """What the process of a rank is started with."""

    kwargs: Mapping[str, Any]  # of its target
    options: Mapping[str, Any]  # of its actor, among them its place
    home: Home | None


async def await_places(
    placement: Placement, group: str, ranks: Collection[int], seconds: float = math.inf
) -> None:
    """Wait until these ranks of a group have places on nodes that are not lost. Raises `NodeNotReplaced`."""
    end, logged = time.monotonic() + seconds, ""
    while (displaced := placement.follow(group)) and not displaced.of(group).isdisjoint(ranks):
        if (left := end - time.monotonic()) <= 0:
            problem = f"cluster.deadlines.lost_node = {seconds:g}: no node has room for {displaced}"
            fix = "add a node and continue with --resume"
            raise NodeNotReplaced(f"{problem}; {fix}. Nodes: {'; '.join(map(str, alive_nodes()))}")
        if logged != str(displaced):
            logged = str(displaced)
            limit = f", for at most {seconds:g} s (cluster.deadlines.lost_node)" if seconds < math.inf else ""
            logger.warning("waiting for a node with room for %s%s", displaced, limit)
        await asyncio.sleep(min(_LONGEST_POLL_SECONDS, left))


class ExtraRanks:
    """Ranks of a group besides those of a placement, each with a reservation of its own.

    In a cluster that can grow, a reservation waits for a node; Ray's autoscaler sees that it does.
    """

    def __init__(
        self, base: Placement, group: str, kwargs: Callable[[int], Mapping[str, Any]], node: str | None = None
    ) -> None:
        """`kwargs` are the arguments of a rank's target; with `node`, its ID, all ranks are there."""
        self._base, self._group, self._kwargs = base, group, kwargs
        request = base.requests[group]
        labels = {**request.labels, **({NODE_LABEL: node} if node is not None else {})}
        if request.topology is not None:  # the same value as that of the others
            labels[request.topology] = base.nodes[group][0].labels[request.topology]
        self._request = replace(request, count=1, labels=labels, topology=None)
        self._reserved: dict[int, Placement] = {}

    async def seat(self, rank: int) -> Seat:
        """Wait until a rank has a place on a node that is not lost. Raises PlacementFailed."""
        if self.node(rank) not in {node.id for node in alive_nodes()}:
            self.release(rank)
            if not self._base.can_grow:
                everyone = {**self._base.requests, self._group: replace(self._request, count=rank + 1)}
                _require_total(list(everyone.values()), "PACK")
            self._reserved[rank] = await reserve(
                [self._request],
                strategy="PACK",
                deadline_seconds=math.inf if self._base.can_grow else MAX_LOCAL_SECONDS,
                can_grow=self._base.can_grow,
                environment=self._base.environment,
            )
        placed = self._reserved[rank]
        node = placed.nodes[self._group][0]
        home = Home(node.id, node.name, ((self._group, (rank,)),)) if self._base.can_grow else None
        return Seat(self._kwargs(rank), placed.options(self._group, 0), home)

    def node(self, rank: int) -> str | None:
        placed = self._reserved.get(rank)
        return placed.nodes[self._group][0].id if placed is not None else None

    def release(self, rank: int) -> None:
        if (placed := self._reserved.pop(rank, None)) is not None:
            placed.release()

    def close(self) -> None:
        for rank in list(self._reserved):
            self.release(rank)


def _require_total(requests: Sequence[WorkerRequest], strategy: str) -> None:
    total, required = ray.cluster_resources(), required_bundles(requests)
    needed = {name: sum(b.get(name, 0.0) for b in required) for name in ("CPU", "GPU")}
    lacking = {name: number - total.get(name, 0.0) for name, number in needed.items()}
    if lacks := [f"{number:g} {name}" for name, number in lacking.items() if number > 0]:
        raise _failure(requests, strategy, f"{' and '.join(lacks)} more than its total")


def _placed(part: Sequence[WorkerRequest], strategy: str) -> PlacementGroup:
    selectors: list[dict[str, str]] = []
    for request in with_places(part):
        at_driver = {NODE_LABEL: driver_node()} if request.at_driver else {}
        selectors += [{**request.labels, **at_driver} for _ in range(request.count)]
    topology = part[0].topology
    where: dict[str, Any] = {"strategy": strategy}
    if topology is not None:
        where = {"topology_strategy": {topology: "STRICT_PACK", NODE_LABEL: strategy}}
    where["bundle_label_selector"] = selectors if any(selectors) else None
    try:
        return placement_group(required_bundles(part), **where)
    except ValueError as error:  # Ray's own rules for labels
        names = ", ".join(request.group for request in part)
        raise PlacementFailed(f"cluster.labels and cluster.topology of {names}: {error}") from error


def _unknown_label(requests: Sequence[WorkerRequest]) -> str | None:
    """A required label that no node has, if any; Ray checks selectors with operators."""
    nodes = alive_nodes()
    for request in requests:
        for label, value in request.labels.items():
            if _PLAIN.fullmatch(value) and all(node.labels.get(label) != value for node in nodes):
                return f"the label {label}={value}, which cluster.labels.{request.group} requires"
        if request.topology is not None and all(request.topology not in node.labels for node in nodes):
            return f"the label {request.topology}, which cluster.topology.{request.group} requires"
    return None


def _failure(requests: Sequence[WorkerRequest], strategy: str, verdict: str) -> PlacementFailed:
    nodes, free = alive_nodes(), ray.available_resources()
    has_labels = any(request.labels or request.topology for request in requests)
    return PlacementFailed(
        f"The workers do not fit into the cluster ({verdict}). Requested with strategy {strategy}: "
        f"{', '.join(map(str, requests))}. The cluster has {len(nodes)} node{'s' * (len(nodes) != 1)} "
        f"({'; '.join(map(str, nodes))}), of which {free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU "
        "are free. "
        + (f"Labels of the nodes: {labels_in_use(nodes)}. Correct cluster.labels. " if has_labels else "")
        + "Use fewer workers (policy.layout, generation.replicas, cluster.rollout_workers), set "
        "cluster.gpus_per_node to the GPUs of a node, or join a larger cluster with RAY_ADDRESS."
    )
