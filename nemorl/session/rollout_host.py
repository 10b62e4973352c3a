"""What runs in a rollout process: the rollout worker, generation replicas as streams, Ray as the store."""

from collections.abc import AsyncIterator, Sequence

import ray

from nemorl.cluster.worker import Worker
from nemorl.config.experiment import Experiment
from nemorl.generation.types import Completion, GenerationRequest
from nemorl.rollout.client import GenerateMany, GenerationClient
from nemorl.rollout.worker import RolloutWorker


class RolloutHost(RolloutWorker):
    """A rollout worker as the driver calls it. Lives in an event loop."""

    def __init__(self, experiment: Experiment, replicas: Sequence[Worker]) -> None:
        seconds = experiment.cluster.deadlines.generation
        client = GenerationClient([_stream_of(replica, seconds) for replica in replicas])
        super().__init__(experiment, client, ray.put)


def _stream_of(replica: Worker, seconds: float) -> GenerateMany:
    """A replica as the client calls it."""

    def generate_many(requests: list[GenerationRequest]) -> AsyncIterator[Completion]:
        return replica.stream("generate_many", requests, stage="generation", deadline_seconds=seconds)

    return generate_many
