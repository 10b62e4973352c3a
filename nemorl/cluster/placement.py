"""Where workers run: on which machine of the cluster, in which of the places that were reserved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .errors import PlacementFailed
from .nodes import LOOPBACK, Home, Node, shared_cores
from .requests import WorkerRequest, with_places


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
        if request.for_children or (beside and not request.lent):
            return 0
        lender = request.beside if beside else request.group
        borrowers = sum(other.lent and other.beside == lender for other in self.requests.values())
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
            for rank, own_places in enumerate(places):
                if len({node_of[bundle] for bundle in own_places}) > 1:
                    raise _divided(request, rank)
            bundles[request.group] = tuple(own_places[0] for own_places in places)
    return bundles


def _divided(request: WorkerRequest, rank: int) -> PlacementFailed:
    ranks = request.neighbours(rank)
    return PlacementFailed(
        f"{request.group} rank {rank} uses the GPUs of {request.beside} ranks {ranks[0]} to {ranks[-1]}, and "
        "these are on several machines: take engines of fewer ranks, or set cluster.placement to STRICT_PACK."
    )
