"""Problems of an experiment with the nodes of a job: sums that Ray's placement then decides in detail."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of
from nemorl.errors import Problem, Problems
from nemorl.plan.machine import Gpu, Machine
from nemorl.plan.problems import plan_run

from . import SlurmError
from .node import NodeInfo
from .ray_node import node_labels

PLAIN_LABEL = re.compile(r"[\w./-]*")  # a value without the operators of Ray's selectors


@dataclass(frozen=True)
class NodeSize:
    node: str
    cpus: int
    gpus: int
    labels: Mapping[str, str]
    part: str | None = None  # of a heterogeneous job: `gpu` or `cpu`

    @property
    def resources(self) -> dict[str, int]:
        return {"CPU": self.cpus, "GPU": self.gpus}


def cluster_overrides(nodes: Mapping[str, NodeInfo], *, gpus_given: bool) -> list[str]:
    """Overrides of the `cluster` section for these nodes; `gpus_given` keeps the experiment's gpus_per_node.

    Else it is that of the node with the most GPUs, so that a node with fewer is reported. CPU nodes of a
    heterogeneous job do not count. Raises `SlurmError` where a node does not see the GPUs that Slurm gave it.
    """
    sizes = {name: info.hardware for name, info in nodes.items() if info.part != "cpu"}
    broken = {name: size for name, size in sizes.items() if size.gpus < size.gpus_allocated}
    if broken:
        listed = ", ".join(f"{name} sees {n.gpus} of {n.gpus_allocated}" for name, n in broken.items())
        exclude = "exclude a node with `nemorl slurm submit --sbatch=--exclude=NODE`."
        fix = f"Run `nvidia-smi` on the node to see why; {exclude}"
        raise SlurmError(f"GPUs that Slurm gave the job do not respond: {listed}. {fix}")
    overrides = [f"cluster.num_nodes={len(nodes)}"]
    if not gpus_given:
        overrides.append(f"cluster.gpus_per_node={max(size.gpus for size in sizes.values())}")
    return overrides


def node_problems(experiment: Experiment, nodes: Mapping[str, NodeInfo]) -> Problems:
    infos = nodes.values()
    hardware = [info.hardware for info in infos]
    # The nodes as one: the cores of the smallest, the memory of all, the smallest GPU of each.
    machine = Machine(
        cores=min(node.cores for node in hardware),
        memory_bytes=sum(node.memory_bytes for node in hardware),
        shared_memory_bytes=None,
        gpus=tuple(Gpu(node.gpu_name, node.gpu_memory_bytes) for node in hardware if node.gpus),
        nodes=len(hardware),
    )
    yield from plan_run(experiment, machine).problems
    sizes = [NodeSize(n.node, n.hardware.cores, n.hardware.gpus, node_labels(n), n.part) for n in infos]
    yield from capacity_problems(experiment, sizes)


def capacity_problems(experiment: Experiment, nodes: Sequence[NodeSize]) -> Problems:
    """Why the processes of a training run cannot fit on these nodes, by sums of CPUs and GPUs.

    A group is counted on the nodes with its labels, as if it were alone there. Labels that no node has may be
    Ray's own, and selectors with operators are left to Ray.
    """
    from nemorl.cluster.placement import required_bundles, with_places, worker_requests  # imports Ray

    gpus_per_node = experiment.cluster.gpus_per_node
    if short := [f"{n.node} has {n.gpus}" for n in nodes if n.gpus < gpus_per_node and n.part != "cpu"]:
        fix = f"{', '.join(short)}: request as many from Slurm (--gpus-per-node), or set it to what is there"
        yield Problem("cluster.gpus_per_node", gpus_per_node, fix)
        return
    models = models_of(experiment)
    unused: set[str] = set()  # offline algorithms start none for sampling
    if not experiment.algorithm.generates:
        unused = {model.name for model in models if model.scores} | {"generation", "rollout", "endpoint"}
    requests = [request for request in worker_requests(experiment) if request.group not in unused]
    placed = with_places(requests)
    processes = [request.group for request in placed for _ in range(request.count)]
    bundles = dict(zip(processes, required_bundles(requests), strict=True))  # of one process, by group
    fields = {"generation": "generation.replicas", "rollout": "cluster.rollout_workers"}
    fields |= {"endpoint": "generation.endpoint"} | {m.name: f"{m.section}.layout" for m in models}

    def too_many(group: str, count: int, problem: str) -> Problem:
        fix = f"{problem}: start fewer processes, or request more or larger nodes (--nodes, --gpus-per-node)"
        value = count if group in ("generation", "rollout") else f"{count} processes"
        return Problem(fields[group], value, fix)

    for resource in ("GPU", "CPU"):
        needed = {r.group: r.count * bundles[r.group].get(resource, 0.0) for r in placed}
        available = {node.node: node.resources[resource] for node in nodes}
        if sum(needed.values()) > sum(available.values()):
            largest = max(placed, key=lambda request: needed[request.group])
            need = f"the run needs {sum(needed.values()):g} {resource}s ({_listed(needed)})"
            have = f"the job has {sum(available.values()):g} ({_listed(available)})"
            yield too_many(largest.group, largest.count, f"{need}, and {have}")
            return
    known = {label for node in nodes for label in node.labels}
    for request in placed:
        labels = {k: v for k, v in request.labels.items() if k in known and PLAIN_LABEL.fullmatch(v)}
        bundle = bundles[request.group]
        suitable = [node.resources for node in nodes if labels.items() <= node.labels.items()]
        places = sum(min(int(has[name] // amount) for name, amount in bundle.items()) for has in suitable)
        if places < request.count:
            listed = ", ".join(f"{name}={value}" for name, value in labels.items())
            where = f"nodes with {listed}" if labels else "the nodes"
            size = " and ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
            problem = f"{where} have room for {places} {request.group} processes ({size} each)"
            yield too_many(request.group, request.count, problem)


def _listed(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in amounts.items())
