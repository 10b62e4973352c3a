"""Engines in processes of their own, as a router calls them, and a router, as their pool calls it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from nemorl.cluster.errors import ClusterError, WorkerFailed
from nemorl.cluster.worker import Worker
from nemorl.generation.router import Replica, Router, RouterFigures
from nemorl.generation.types import GenerationRequest, ReplicaLost, Report, RequestRefused

# Beyond the requests' own deadline, at which the engine ends them: who hangs longer is lost.
GRACE_SECONDS = 30.0
ABORT_SECONDS = 30.0
_REFUSED = f"{RequestRefused.__module__}.{RequestRefused.__qualname__}"


def ray_replica(engine: Worker) -> Replica:
    """The replica whose host is this worker."""

    async def generate(requests: list[GenerationRequest]) -> AsyncGenerator[Sequence[Report], None]:
        # What was sampled together travels together: an item of a stream costs Ray about a millisecond.
        batches = engine.stream(
            "generate_batches",
            requests,
            stage="generation",
            deadline_seconds=max(request.deadline_seconds for request in requests) + GRACE_SECONDS,
        )
        try:
            async with aclosing(batches):
                async for batch in batches:
                    yield batch
        except WorkerFailed as error:
            if error.kind == _REFUSED:
                raise RequestRefused(error.message) from error
            raise ReplicaLost(str(error)) from error
        except ClusterError as error:
            raise ReplicaLost(str(error)) from error

    async def abort(request_ids: Sequence[str]) -> None:
        await engine.call_async("abort", request_ids, stage="abort", deadline_seconds=ABORT_SECONDS)

    return Replica(f"generation replica {engine.rank}", generate, abort)


class PooledRouter:
    """What has a router over a pool's engines in its process: mixed into what the process hosts."""

    _router: Router

    def add_engine(self, engine: Worker) -> None:
        """Sample from this engine too, which takes the place of a lost one."""
        self._router.add(ray_replica(engine))

    def lost_replicas(self) -> dict[str, str]:
        """The cause of each loss by the replica's name."""
        return dict(self._router.lost)

    def take_router_figures(self) -> RouterFigures:
        """What became of requests since the last call."""
        return self._router.take_figures()
