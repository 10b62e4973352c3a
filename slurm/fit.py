"""Whether an experiment's processes find room on the nodes of a job. Pure, and said before Ray starts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nemorl.errors import Problem


@dataclass(frozen=True)
class Room:
    """What one node offers to Ray."""

    node: str
    cpus: int
    gpus: int
    labels: Mapping[str, str]
    part: str | None = None  # in a heterogeneous job, `gpu` or `cpu`


@dataclass(frozen=True)
class Demand:
    """A place that one process wants, for itself and for who is beside it."""

    group: str
    cpus: float
    gpus: float
    labels: Mapping[str, str]  # selectors of Ray's, by label
    topology: str | None = None  # a label of which all nodes of the group must have the same value


def fit_problems(
    demands: Sequence[Demand], rooms: Sequence[Room], strategy: str, gpus_per_node: int
) -> Iterator[Problem]:
    """Why the processes cannot be placed; nothing where they can.

    A label that none of the nodes is known to have may be one that Ray gives, and is left to it.
    """
    short = [room for room in rooms if room.gpus < gpus_per_node and room.part != "cpu"]
    if short:
        have = ", ".join(f"{room.node} has {room.gpus}" for room in short)
        fix = f"{have}: ask Slurm for as many (--gpus-per-node), or set it to what is there"
        yield Problem("cluster.gpus_per_node", gpus_per_node, fix)
        return
    for name, field in (("gpus", "GPUs"), ("cpus", "CPUs")):
        wanted = sum(getattr(demand, name) for demand in demands)
        there = sum(getattr(room, name) for room in rooms)
        if wanted > there:
            yield _too_many(demands, rooms, name, f"{wanted:g} {field} are wanted, and the job has {there:g}")
            return
    known = {name for room in rooms for name in room.labels}
    demands = [replace(d, labels={k: v for k, v in d.labels.items() if k in known}) for d in demands]
    if divided := list(_divided(demands, rooms, strategy)):
        yield from divided
        return
    # Groups with a topology are reserved apart, so they need not be on the nodes of the others.
    together = [d for d in demands if d.topology is None] if strategy.startswith("STRICT") else demands
    if (left := unplaced(together, rooms, strategy)) is not None:
        where = f" with {', '.join(f'{k}={v}' for k, v in left.labels.items())}" if left.labels else ""
        size = f"{left.cpus:g} CPUs" + (f" and {left.gpus:g} GPUs" if left.gpus else "")
        problem = f"no node{where} has room for one of the {left.group} processes ({size}) after the others"
        if unplaced(together, rooms, "PACK") is None:
            yield Problem(
                "cluster.placement", strategy, f"{problem}: take auto, PACK or SPREAD, or larger nodes"
            )
        else:
            yield _too_many(demands, rooms, "gpus" if left.gpus else "cpus", problem)


def _divided(demands: Sequence[Demand], rooms: Sequence[Room], strategy: str) -> Iterator[Problem]:
    """Groups that want one domain and find room in none."""
    for group, label in {d.group: d.topology for d in demands if d.topology is not None}.items():
        own = [demand for demand in demands if demand.group == group]
        values = sorted({room.labels[label] for room in rooms if label in room.labels})
        domains = {value: [room for room in rooms if room.labels.get(label) == value] for value in values}
        if not domains or any(unplaced(own, there, strategy) is None for there in domains.values()):
            continue
        each = "; ".join(
            f"{value} has {sum(room.gpus for room in there)} GPUs and {sum(room.cpus for room in there)} CPUs"
            for value, there in domains.items()
        )
        wanted = f"{sum(d.gpus for d in own):g} GPUs and {sum(d.cpus for d in own):g} CPUs"
        fix = f"the {group} processes want {wanted} in one, and no domain has room for them ({each})"
        yield Problem(
            f"cluster.topology.{group}", label, f"{fix}: take fewer processes, or leave the topology out"
        )


PART = "nemorl.io/part"


def unplaced(demands: Sequence[Demand], rooms: Sequence[Room], strategy: str) -> Demand | None:
    """The first demand that finds no place, the largest served first, as Ray does; None where all do."""
    if strategy == "STRICT_PACK":
        alone = [unplaced(demands, [room], "PACK") for room in rooms]
        return None if None in alone else alone[0]
    free = {room.node: [float(room.cpus), float(room.gpus)] for room in rooms}
    used: set[str] = set()
    for demand in sorted(demands, key=lambda d: (len(d.labels), d.gpus, d.cpus), reverse=True):
        fitting = [
            room.node
            for room in rooms
            if free[room.node][0] >= demand.cpus
            and free[room.node][1] >= demand.gpus
            and all(selects(selector, room.labels.get(name)) for name, selector in demand.labels.items())
            and not (strategy == "STRICT_SPREAD" and room.node in used)
        ]
        if not fitting:
            return demand
        # A process without a GPU goes where fewest are left, so that it takes no CPU from one that wants one.
        node = min(fitting, key=lambda name: (free[name][1], free[name][0]))
        free[node][0] -= demand.cpus
        free[node][1] -= demand.gpus
        used.add(node)
    return None


def selects(selector: str, value: str | None) -> bool:
    """Whether a label selector of Ray's takes a value: `a`, `in(a,b)`, and with `!` all others, or none."""
    found = re.fullmatch(r"(!?)(?:(?:in)?\((.*)\)|(.*))", selector)
    assert found is not None
    listed = found[3] if found[2] is None else found[2]
    return (value in [name.strip() for name in listed.split(",")]) != bool(found[1])


def _too_many(demands: Sequence[Demand], rooms: Sequence[Room], name: str, problem: str) -> Problem:
    """The group that asks for the most of what is short decides which field is named."""
    wanted: dict[str, float] = {}
    for demand in demands:
        wanted[demand.group] = wanted.get(demand.group, 0) + getattr(demand, name)
    most = max(wanted, key=lambda group: wanted[group])
    fields = {"generation": "generation.replicas", "rollout": "cluster.rollout_workers"}
    field = fields.get(most, f"{most}.layout")
    groups = ", ".join(f"{group} {count:g}" for group, count in wanted.items())
    each = ", ".join(f"{room.node} {getattr(room, name):g}" for room in rooms)
    more = "--nodes, --gpus-per-node" if name == "gpus" else "--nodes"
    fix = f"{problem} (wanted: {groups}; there: {each}): take fewer processes, or ask Slurm for more ({more})"
    return Problem(field, f"{wanted[most]:g} {name}", fix)
