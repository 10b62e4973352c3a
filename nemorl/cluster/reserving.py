"""Getting the places: all workers of a run at once, or none, and why they do not fit."""

import asyncio
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from .errors import PlacementFailed
from .nodes import DOMAIN_LABEL, NODE_LABEL, Node, alive_nodes, driver_node, labels_in_use
from .placement import Placement, assigned_bundles
from .requests import WorkerRequest, wanted_bundles, with_places

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
