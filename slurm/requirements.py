"""What an experiment asks of the nodes of a job."""

from collections.abc import Iterator, Mapping, Sequence

from nemorl.cluster.placement import required_bundles, with_places, worker_requests
from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of
from nemorl.errors import Problem
from nemorl.plan.machine import Gpu, Machine
from nemorl.plan.problems import plan_run

from .errors import SlurmError
from .fit import PART, Demand, Room, fit_problems
from .jobs import most_cpus
from .ray_node import NODE, labels
from .rendezvous import Card
from .submission import Options


def words_for(cards: Mapping[str, Card], *, gpus_given: bool) -> list[str]:
    """What the job's nodes make of the `cluster` section; `gpus_given` keeps the experiment's own number.

    The GPUs of a node are those of the one with the most, so that one with fewer is named, not made the rule.
    CPU nodes of a heterogeneous job do not count. Raises `SlurmError` where a node does not see its GPUs.
    """
    of_gpus = {card.node: card.hardware for card in cards.values() if card.part != "cpu"}
    if blind := [
        f"{node} sees {has.gpus} of {has.gpus_given}" for node, has in of_gpus.items() if has.is_blind
    ]:
        raise SlurmError(
            f"Slurm gave the job GPUs that do not answer: {', '.join(blind)}. `nvidia-smi` on the node says "
            "why; to do without a node, `nemorl slurm submit --sbatch=--exclude=NODE`"
        )
    words = [f"cluster.num_nodes={len(cards)}"]
    if not gpus_given:
        words.append(f"cluster.gpus_per_node={max(has.gpus for has in of_gpus.values())}")
    return words


def rooms_of(cards: Mapping[str, Card]) -> list[Room]:
    """What the nodes offer, the head's first."""
    return [Room(c.node, c.hardware.cores, c.hardware.gpus, labels(c), c.part) for c in cards.values()]


def rooms_asked(options: Options) -> list[Room]:
    """What the nodes that are asked for offer at most; none where Slurm does not tell how large they are."""
    parts = [(options.nodes, options.partition, options.gpus_per_node, "gpu")]
    if options.cpu_nodes:
        parts.append((options.cpu_nodes, options.cpu_partition or options.partition, 0, "cpu"))
    rooms: list[Room] = []
    for count, partition, gpus, part in parts:
        if not (cpus := most_cpus(partition)):
            return []
        own = {PART: part} if options.cpu_nodes or gpus else {}  # else the nodes say it
        rooms += [Room(f"node {len(rooms) + i}", cpus, gpus, own, part) for i in range(1, count + 1)]
    return rooms


def machine_of(cards: Mapping[str, Card]) -> Machine:
    """The nodes as one: the cores of the smallest, the memory of all, the smallest GPU of each."""
    nodes = [card.hardware for card in cards.values()]
    return Machine(
        cores=min(node.cores for node in nodes),
        memory_bytes=sum(node.memory_bytes for node in nodes),
        shared_memory_bytes=None,
        gpus=tuple(Gpu(node.gpu_name, node.gpu_memory_bytes) for node in nodes if node.gpus),
        nodes=len(nodes),
    )


def demands_of(experiment: Experiment, head: str) -> list[Demand]:
    """The places of all processes of a training run; `head` is the node of its driver."""
    sampling = experiment.algorithm.generates
    left_out = {model.name for model in models_of(experiment) if model.scores and not sampling}
    left_out |= set() if sampling else {"generation", "rollout", "endpoint"}
    requests = [request for request in worker_requests(experiment) if request.group not in left_out]
    own = [request for request in with_places(requests) for _ in range(request.count)]
    return [
        Demand(
            request.group,
            bundle["CPU"],
            bundle.get("GPU", 0.0),
            {**request.labels, **({NODE: head} if request.at_driver else {})},
            request.topology,
        )
        for request, bundle in zip(own, required_bundles(requests), strict=True)
    ]


def no_room(experiment: Experiment, rooms: Sequence[Room]) -> Iterator[Problem]:
    """Why the processes of an experiment do not find room on these nodes, of which the first is the head."""
    cluster, demands = experiment.cluster, demands_of(experiment, rooms[0].node)
    yield from fit_problems(demands, rooms, cluster.strategy, cluster.gpus_per_node)


def problems_of(experiment: Experiment, cards: Mapping[str, Card]) -> Iterator[Problem]:
    """What speaks against an experiment on these nodes: model, files, memory, and room for its processes."""
    yield from plan_run(experiment, machine_of(cards)).problems
    yield from no_room(experiment, rooms_of(cards))
