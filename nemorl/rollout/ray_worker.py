"""The rollout worker as one of Ray's processes: it samples from workers of another group."""

from collections.abc import AsyncIterator, Sequence
from functools import partial

import ray

from nemorl.cluster.worker import Worker
from nemorl.config.experiment import Experiment
from nemorl.generation.types import Completion, GenerationRequest

from .client import GenerationClient
from .worker import RolloutWorker


class RayRolloutWorker(RolloutWorker):
    """Hosted by an `AsyncHost`; keeps trajectories in Ray's object store."""

    def __init__(self, experiment: Experiment, engines: Sequence[Worker]) -> None:
        """`engines`: the workers that host a `GenerationWorker` each."""
        seconds = experiment.cluster.deadlines.generation
        replicas = [partial(_generate_many, engine, seconds) for engine in engines]
        super().__init__(experiment, GenerationClient(replicas), store=ray.put)


def _generate_many(
    engine: Worker, seconds: float, requests: list[GenerationRequest]
) -> AsyncIterator[Completion]:
    return engine.stream("generate_many", requests, stage="generation", deadline_seconds=seconds)
