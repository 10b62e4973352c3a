"""Which processes an experiment wants: how many of each group, with which resources, on which nodes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of


@dataclass(frozen=True)
class WorkerRequest:
    """Processes of one group. Each takes one of Ray's logical CPUs, whatever the number of its threads."""

    group: str
    count: int
    gpus: int = 0  # that each process works on
    for_children: bool = False  # the GPUs are for actors that each process starts in its own place
    beside: str | None = None  # a group in the places of whose ranks, one for each GPU, they live, if it runs
    lent: bool = False  # of what is beside another: Ray lends it a part of the GPU; else it is told its names
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
            lent=model.on_policy_devices,
        )
        for model in others
    ]
    engines = WorkerRequest(
        "generation",
        generation.replicas,
        gpus * generation.ranks_per_replica,
        for_children=generation.backend == "trtllm",
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
