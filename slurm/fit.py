"""Whether an experiment's processes find room on the nodes of a job. Pure, and said before Ray starts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nemorl.errors import Violation


@dataclass(frozen=True)
class Room:
    """What one node offers to Ray."""

    node: str
    cpus: int
    gpus: int
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Demand:
    """A place that one process wants, for itself and for who is beside it."""

    group: str
    cpus: float
    gpus: float
    labels: Mapping[str, str]  # that the node must have


def fit_violations(
    demands: Sequence[Demand], rooms: Sequence[Room], strategy: str, gpus_per_node: int
) -> Iterator[Violation]:
    """Why the processes cannot be placed; nothing where they can."""
    short = [room for room in rooms if room.gpus < gpus_per_node and room.labels.get(PART) != "cpu"]
    if short:
        have = ", ".join(f"{room.node} has {room.gpus}" for room in short)
        mend = f"{have}: ask Slurm for as many (--gpus-per-node), or set it to what is there"
        yield Violation("cluster.gpus_per_node", gpus_per_node, mend)
        return
    for name, field in (("gpus", "GPUs"), ("cpus", "CPUs")):
        wanted = sum(getattr(demand, name) for demand in demands)
        there = sum(getattr(room, name) for room in rooms)
        if wanted > there:
            yield _too_many(demands, rooms, name, f"{wanted:g} {field} are wanted, and the job has {there:g}")
            return
    if (left := unplaced(demands, rooms, strategy)) is not None:
        where = f" with {', '.join(f'{k}={v}' for k, v in left.labels.items())}" if left.labels else ""
        size = f"{left.cpus:g} CPUs" + (f" and {left.gpus:g} GPUs" if left.gpus else "")
        problem = f"no node{where} has room for a {left.group} process of {size} after the others"
        if strategy.startswith("STRICT"):
            yield Violation(
                "cluster.placement", strategy, f"{problem}: take auto, PACK or SPREAD, or larger nodes"
            )
        else:
            yield _too_many(demands, rooms, "gpus" if left.gpus else "cpus", problem)


PART = "nemorl.io/part"


def unplaced(demands: Sequence[Demand], rooms: Sequence[Room], strategy: str) -> Demand | None:
    """The first demand that finds no place, the largest served first, as Ray does; None where all do."""
    free = {room.node: [float(room.cpus), float(room.gpus)] for room in rooms}
    used: set[str] = set()
    for demand in sorted(demands, key=lambda d: (len(d.labels), d.gpus, d.cpus), reverse=True):
        fitting = [
            room.node
            for room in rooms
            if free[room.node][0] >= demand.cpus
            and free[room.node][1] >= demand.gpus
            and all(room.labels.get(name) == value for name, value in demand.labels.items())
            and not (strategy == "STRICT_SPREAD" and room.node in used)
            and not (strategy == "STRICT_PACK" and used - {room.node})
        ]
        if not fitting:
            return demand
        # A process without a GPU goes where fewest are left, so that it takes no CPU from one that wants one.
        node = min(fitting, key=lambda name: (free[name][1], free[name][0]))
        free[node][0] -= demand.cpus
        free[node][1] -= demand.gpus
        used.add(node)
    return None


def _too_many(demands: Sequence[Demand], rooms: Sequence[Room], name: str, problem: str) -> Violation:
    """The group that asks for the most of what is short decides which field is named."""
    wanted: dict[str, float] = {}
    for demand in demands:
        wanted[demand.group] = wanted.get(demand.group, 0) + getattr(demand, name)
    most = max(wanted, key=lambda group: wanted[group])
    fields = {"generation": "generation.replicas", "rollout": "cluster.rollout_workers"}
    field = fields.get(most, f"{most}.layout")
    groups = ", ".join(f"{group} {count:g}" for group, count in wanted.items())
    each = ", ".join(f"{room.node} {getattr(room, name):g}" for room in rooms)
    mend = (
        f"{problem} (wanted: {groups}; there: {each}): take fewer processes, or ask Slurm for more (--nodes, "
        f"{'--gpus-per-node' if name == 'gpus' else '--cpus-per-task'})"
    )
    return Violation(field, f"{wanted[most]:g} {name}", mend)
