"""The rollout worker as one of Ray's processes: it samples from workers of another group."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from nemorl.cluster.worker import Worker
from nemorl.config.experiment import Experiment
from nemorl.generation.router import Router

from .dispatch import RunGroups
from .groups import GroupAssignment, GroupSummary
from .ray_replica import PooledRouter, ray_replica
from .worker import RolloutWorker


class RayRolloutWorker(PooledRouter, RolloutWorker):
    """Hosted by an `AsyncHost`."""

    def __init__(self, experiment: Experiment, engines: Sequence[Worker]) -> None:
        """`engines`: the workers that host an engine each."""
        self._router = Router([ray_replica(engine) for engine in engines])
        super().__init__(experiment, self._router, store=lambda trajectories: trajectories)

    async def stream_groups(self, assignments: Sequence[GroupAssignment]) -> AsyncIterator[Any]:
        """Each group's trajectories, then its summary.

        As items of their own the trajectories belong to whoever reads the stream. A reference inside the
        summary would belong to this process, which may drop its last hold on it before the reader has one.
        """
        async with aclosing(self.run_groups(assignments)) as summaries:
            async for summary in summaries:
                yield summary.reference
                yield replace(summary, reference=None)


def groups_of(worker: Worker, seconds: float) -> RunGroups:
    """A `RayRolloutWorker` as the collector calls it: summaries that refer to trajectories left in place."""

    async def run_groups(assignments: Sequence[GroupAssignment]) -> AsyncIterator[GroupSummary]:
        pairs = worker.stream(
            "stream_groups", assignments, stage="generation", deadline_seconds=seconds, pairs=True
        )
        async with aclosing(pairs):
            async for reference, summary in pairs:
                yield replace(summary, reference=reference)

    return run_groups
