"""Where workers run: how many of each group, with which resources, on which machine of the cluster."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from nemorl.config.models import models_of

from .errors import PlacementFailed

_WAIT_SECONDS = 1.0  # at most this long does the thread of a cancelled wait live on


@dataclass(frozen=True)
class WorkerRequest:
    """Processes of one group. Each takes one of Ray's logical CPUs, whatever the number of its threads."""

    group: str
    count: int
    gpus: int = 0  # that each process works on
    for_children: bool = False  # the GPUs are for actors that each process starts in its own place
    beside: str | None = None  # a group in the places of whose ranks, one for each GPU, they live, if it runs
    lent: bool = False  # of what is beside another: Ray lends it a part of the GPU; else it is told its names

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
        each = "1 CPU" + (f" and {self.gpus} GPU" if self.gpus else "")
        return f"{name} ({each} each{f', in places of {self.beside} workers' if self.beside else ''})"


def worker_requests(experiment: Experiment) -> tuple[WorkerRequest, ...]:
    """The processes of an experiment. Ranks of models and of engines get a GPU each, if any.

    Those of generation are not there where the policy samples by itself. What shares the policy's devices is
    beside it: models rank by rank, an engine of n ranks beside n ranks of the policy.
    """
    gpus = 1 if experiment.cluster.gpus_per_node else 0
    policy, *others = models_of(experiment)
    models = [
        WorkerRequest(
            model.name,
            model.config.layout.world_size,
            gpus,
            beside="policy" if model.on_policy_devices else None,
            lent=model.on_policy_devices,
        )
        for model in others
    ]
    generation = experiment.generation
    engines = [
        WorkerRequest(
            "generation",
            generation.replicas,
            gpus * generation.ranks_per_replica,
            for_children=generation.backend == "trtllm",
            beside="policy" if generation.shares_devices and gpus else None,
        )
    ]
    if not experiment.generation.has_engines:
        engines = []
    return (
        WorkerRequest("policy", policy.config.layout.world_size, gpus),
        *models,
        *engines,
        WorkerRequest("rollout", experiment.cluster.rollout_workers),
        *([WorkerRequest("endpoint", 1)] if experiment.generation.endpoint is not None else []),
    )


def own_gpus() -> tuple[str, ...]:
    """The GPUs of the worker that calls this, as CUDA_VISIBLE_DEVICES names them."""
    return tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def threads_per_worker(configured: int | None, workers: int, num_nodes: int) -> int:
    """CPU threads of each process of a group: as configured, or a machine's cores shared evenly."""
    per_node = -(-workers // num_nodes)
    return configured or max(1, available_cores() // per_node)


@dataclass(frozen=True)
class Placement:
    """Reserved places for all workers of a run."""

    group: PlacementGroup
    bundles: Mapping[str, tuple[int, ...]]  # by worker group, the bundle of each rank
    requests: Mapping[str, WorkerRequest]
    environment: Mapping[str, str] = field(default_factory=dict)  # that every worker gets

    def beside(self, group: str) -> tuple[range, ...]:
        """For each rank of a group the ranks of another on whose GPUs it works; nothing if it has its own."""
        request = self.requests[group]
        if request.beside not in self.requests:
            return ()
        return tuple(request.neighbours(rank) for rank in range(request.count))

    def options(self, group: str, rank: int) -> dict[str, Any]:
        """Ray's options for the actor of one rank."""
        bundle = self.bundles[group][rank]
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
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
        remove_placement_group(self.group)


async def reserve(
    requests: Sequence[WorkerRequest],
    *,
    strategy: str,
    deadline_seconds: float,
    can_grow: bool,
    environment: Mapping[str, str],
) -> Placement:
    """Reserve places for all workers at once, or none.

    `strategy` is one of Ray's. A cluster that cannot grow is refused at once when it is too small as a whole;
    otherwise nodes may join until the deadline. Raises `PlacementFailed`.
    """
    if not can_grow and (lacking := _lacking(requests)):
        raise _failure(requests, strategy, f"{lacking} more than all of it")
    group = placement_group(wanted_bundles(requests), strategy=strategy)
    ready = False
    try:
        ready = await _ready(group, deadline_seconds)
    finally:
        if not ready:  # also when the wait was cancelled
            remove_placement_group(group)
    if not ready:
        raise _failure(requests, strategy, f"not possible within {deadline_seconds:g} s")
    node_of: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    try:
        bundles = assigned_bundles(requests, node_of)
    except PlacementFailed:
        remove_placement_group(group)
        raise
    return Placement(group, bundles, {r.group: r for r in requests}, environment)


async def _ready(group: PlacementGroup, seconds: float) -> bool:
    """Whether the places are there before the deadline. Ray's wait blocks, so a thread waits, bit by bit."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if await asyncio.to_thread(group.wait, min(_WAIT_SECONDS, left)):
            return True
    return False


def wanted_bundles(requests: Sequence[WorkerRequest]) -> list[dict[str, float]]:
    """What to reserve, group by group. What is beside others has no bundles, but a CPU in each of theirs."""
    beside = Counter(request.beside for request in requests)
    return [
        {**request.bundle, "CPU": request.bundle["CPU"] + beside[request.group]}
        for request in _with_places(requests)
        for _ in range(request.count)
    ]


def assigned_bundles(
    requests: Sequence[WorkerRequest], node_of: Mapping[int, str]
) -> dict[str, tuple[int, ...]]:
    """Bundle of each rank, so that consecutive ranks (tensor-parallel neighbours) share a machine.

    A process beside others is in the bundle of the first of them. `node_of` names the machine of each bundle.
    Raises `PlacementFailed` if they are on several.
    """
    bundles: dict[str, tuple[int, ...]] = {}
    first = 0
    for request in _with_places(requests):
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


def _with_places(requests: Sequence[WorkerRequest]) -> list[WorkerRequest]:
    """Those that are in nobody else's."""
    there = {request.group for request in requests}
    return [request for request in requests if request.beside not in there]


def _divided(request: WorkerRequest, rank: int) -> PlacementFailed:
    ranks = request.neighbours(rank)
    return PlacementFailed(
        f"{request.group} rank {rank} uses the GPUs of {request.beside} ranks {ranks[0]} to {ranks[-1]}, and "
        "these are on several machines: take engines of fewer ranks, or set cluster.placement to STRICT_PACK."
    )


def _lacking(requests: Sequence[WorkerRequest]) -> str:
    has = ray.cluster_resources()
    wanted = wanted_bundles(requests)
    cpus = sum(bundle["CPU"] for bundle in wanted) - has.get("CPU", 0.0)
    gpus = sum(bundle.get("GPU", 0.0) for bundle in wanted) - has.get("GPU", 0.0)
    return " and ".join(f"{lack:g} {name}" for lack, name in ((cpus, "CPU"), (gpus, "GPU")) if lack > 0)


def _failure(requests: Sequence[WorkerRequest], strategy: str, verdict: str) -> PlacementFailed:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    has = "; ".join(
        f"{node['NodeManagerHostname']}: {node['Resources'].get('CPU', 0):g} CPU, "
        f"{node['Resources'].get('GPU', 0):g} GPU"
        for node in nodes
    )
    free = ray.available_resources()
    return PlacementFailed(
        f"The workers do not fit into the cluster ({verdict}). Asked for, with strategy {strategy}: "
        f"{', '.join(map(str, requests))}. The cluster has {len(nodes)} node{'s' * (len(nodes) != 1)} "
        f"({has}), of which {free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU are free. "
        "Ask for fewer workers (policy.layout, generation.replicas, cluster.rollout_workers), set "
        "cluster.gpus_per_node to what is there, or join a larger cluster with RAY_ADDRESS."
    )
