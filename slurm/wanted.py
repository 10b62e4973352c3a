"""What an experiment asks of the nodes of a job."""

from collections.abc import Mapping, Sequence

from nemorl.cluster.requests import with_places, worker_requests
from nemorl.config.experiment import Experiment
from nemorl.config.models import models_of
from nemorl.errors import Violation

from .fit import Demand, Room, fit_violations
from .meeting import Card
from .ray_node import labels


def words_for(cards: Mapping[str, Card], *, gpus_given: bool) -> list[str]:
    """What the job's nodes make of the `cluster` section; `gpus_given` keeps the experiment's own number.

    The GPUs of a node are those of the smallest, without the CPU nodes of a heterogeneous job.
    """
    words = [f"cluster.num_nodes={len(cards)}"]
    if not gpus_given:
        gpus = min(card.hardware.gpus for card in cards.values() if card.part != "cpu")
        words.append(f"cluster.gpus_per_node={gpus}")
    return words


def rooms_of(cards: Mapping[str, Card]) -> list[Room]:
    """What the nodes offer."""
    return [Room(c.node, c.hardware.cores, c.hardware.gpus, labels(c)) for c in cards.values()]


def demands_of(experiment: Experiment) -> list[Demand]:
    """The places of all processes of a training run."""
    from nemorl.cluster.placement import wanted_bundles  # Ray

    sampling = experiment.algorithm.generates
    left_out = {model.name for model in models_of(experiment) if model.scores and not sampling}
    left_out |= set() if sampling else {"generation", "rollout", "endpoint"}
    requests = [request for request in worker_requests(experiment) if request.group not in left_out]
    own = [request for request in with_places(requests) for _ in range(request.count)]
    return [
        Demand(request.group, bundle["CPU"], bundle.get("GPU", 0.0), request.labels)
        for request, bundle in zip(own, wanted_bundles(requests), strict=True)
    ]


def violations_of(experiment: Experiment, rooms: Sequence[Room]) -> list[Violation]:
    """Why the experiment does not fit these nodes."""
    cluster = experiment.cluster
    return list(fit_violations(demands_of(experiment), rooms, cluster.strategy, cluster.gpus_per_node))
