"""The OpenAI-compatible endpoint over the engines of a session: beside a run, or as all there is to do."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from nemorl.cluster.group import Worker
from nemorl.cluster.placement import worker_requests
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.experiment import Experiment
from nemorl.config.generation import EndpointConfig
from nemorl.data.tokenizer import load_tokenizer
from nemorl.generation.router import Router
from nemorl.generation.types import NoReplicaLeft
from nemorl.rollout.worker import PooledRouter, ray_replica
from nemorl.serve.sampling import Served
from nemorl.serve.server import Listening, listening

from .session import open_engines

_LOOK_SECONDS = 1.0  # between two looks whether an engine is left


def served(experiment: Experiment, endpoint: EndpointConfig, router: Router) -> Served:
    """What an endpoint serves. Raises TokenizerError."""
    return Served(
        router,
        load_tokenizer(experiment.policy),
        endpoint.model_name or experiment.policy.model_path.absolute().name,
        experiment.policy.max_sequence_length,
        endpoint.timeout,
    )


class EndpointHost(PooledRouter):
    """What runs in the process of an endpoint beside a run. Lives in an event loop."""

    def __init__(self, experiment: Experiment, engines: Sequence[Worker]) -> None:
        endpoint = experiment.generation.endpoint
        assert endpoint is not None, "this process is for experiments with an endpoint"
        self._config = endpoint
        self._router = Router([ray_replica(engine) for engine in engines])
        self._served = served(experiment, endpoint, self._router)
        self._open = AsyncExitStack()

    async def listen(self) -> Listening:
        """Answer from now on. Raises RunError when the address cannot be had."""
        return await self._open.enter_async_context(listening(self._config, self._served))

    async def close(self) -> None:
        """Answer no more."""
        await self._open.aclose()


class _RouterHere(PooledRouter):
    """The router of this process, as a pool calls those of others (`Routers`)."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def call_async(self, method: str, *args: Any, stage: str, deadline_seconds: float) -> list[Any]:
        return [getattr(self, method)(*args)]


def serve(experiment: Experiment, tell: Callable[[Listening], None]) -> None:
    """Start the engines of an experiment and answer over HTTP until the process is told to end.

    `tell` hears where, once that works. Raises NemorlError, among them NoReplicaLeft.
    """
    asyncio.run(_serve(experiment, tell))


async def _serve(experiment: Experiment, tell: Callable[[Listening], None]) -> None:
    endpoint = experiment.generation.endpoint or EndpointConfig()
    engines = [request for request in worker_requests(experiment) if request.group == "generation"]
    async with AsyncExitStack() as stack:
        runtime = stack.enter_context(ClusterRuntime(experiment.cluster, engines))
        placement = await runtime.reserve()
        stack.callback(placement.release)
        pool = await stack.enter_async_context(open_engines(experiment, placement))
        router = Router([ray_replica(worker) for worker in pool.group.workers])
        pool.serve(_RouterHere(router))
        end = asyncio.Event()
        # After Ray's start, which takes the signals for itself.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end.set)
        tell(await stack.enter_async_context(listening(endpoint, served(experiment, endpoint, router))))
        while not await _set_within(end, _LOOK_SECONDS):
            pool.check_watch()
            if pool.hopeless:
                raise NoReplicaLeft(dict(pool.losses))
            pool.tell_losses()  # at once: nothing else tells those who serve why nobody answers


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
