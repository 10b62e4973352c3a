"""HTTP endpoints: over a run's engines, over engines alone, and over a reward model.

A reward model runs in the same worker as policies and critics (`PolicyWorker`), so every family and layout
can be served, and an answer's score is the one that training a policy or the reward model itself computes. It
has no optimizer.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from nemorl.cluster.errors import ClusterError
from nemorl.cluster.placement import worker_requests
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec
from nemorl.config.generation import EndpointConfig
from nemorl.data.examples import Example
from nemorl.data.tokenizer import load_tokenizer
from nemorl.generation.router import Replica, Router, RouterMetrics
from nemorl.generation.types import NoReplicaLeft
from nemorl.rollout.worker import PooledRouter
from nemorl.serve.app import Listening, answering, listening
from nemorl.serve.sampling import Served

from .handles import ModelHandle
from .scoring import RewardScorer, reward_routes
from .session import Starter, open_engines

_POLL_SECONDS = 1.0  # between two checks whether an engine is left


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
    """The endpoint of a run, in its own process. Belongs to one event loop."""

    def __init__(self, experiment: Experiment, engines: Sequence[Replica]) -> None:
        endpoint = experiment.generation.endpoint
        assert endpoint is not None, "this process is for experiments with an endpoint"
        self._config = endpoint
        self._router = Router(list(engines))
        self._served = served(experiment, endpoint, self._router)
        self._open = AsyncExitStack()

    async def listen(self) -> Listening:
        """Answer from now on. Raises RunError when the address is not available."""
        return await self._open.enter_async_context(listening(self._config, self._served))

    async def close(self) -> None:
        """Stop answering."""
        await self._open.aclose()


class _LocalRouter:
    """The router of this process (`Routers`)."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def take_metrics(self, deadline_seconds: float) -> list[RouterMetrics]:
        return [self._router.take_metrics()]

    async def lost_replicas(self, deadline_seconds: float) -> list[dict[str, str]]:
        return [dict(self._router.lost)]

    async def add(self, replica: Replica, deadline_seconds: float) -> None:
        self._router.add(replica)


def serve(experiment: Experiment, announce: Callable[[Listening], None]) -> None:
    """Start the engines of an experiment and answer over HTTP until the process receives SIGINT or SIGTERM.

    `announce` receives the address once the endpoint answers. Raises NemorlError, among them NoReplicaLeft.
    """
    asyncio.run(_serve(experiment, announce))


async def _serve(experiment: Experiment, announce: Callable[[Listening], None]) -> None:
    endpoint = experiment.generation.endpoint or EndpointConfig()
    engines = [request for request in worker_requests(experiment) if request.group == "generation"]
    async with AsyncExitStack() as stack:
        runtime = stack.enter_context(ClusterRuntime(experiment.cluster, engines))
        placement = await runtime.reserve()
        stack.callback(placement.release)
        replicas = await stack.enter_async_context(open_engines(experiment, placement))
        router = Router([engine.as_replica() for engine in replicas.engines])
        replicas.connect(_LocalRouter(router))
        end = asyncio.Event()
        # After Ray's start, which takes the signals for itself.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end.set)
        announce(await stack.enter_async_context(listening(endpoint, served(experiment, endpoint, router))))
        while not await _set_within(end, _POLL_SECONDS):
            replicas.check_watch()
            if replicas.exhausted:
                raise NoReplicaLeft(dict(replicas.losses))
            replicas.log_losses()  # at once: nothing else reports why no engine answers


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def serve_rewards(experiment: Experiment, announce: Callable[[Listening], None]) -> None:
    """Start an experiment's reward model and answer over HTTP until the process receives SIGINT or SIGTERM.

    `announce` receives the address once the endpoint answers. Raises NemorlError.
    """
    asyncio.run(_serve_rewards(experiment, announce))


async def _serve_rewards(experiment: Experiment, announce: Callable[[Listening], None]) -> None:
    endpoint = experiment.generation.endpoint or EndpointConfig()
    async with AsyncExitStack() as stack:
        scorer = await _open(experiment, stack)
        end, failures = asyncio.Event(), []

        async def score(examples: Sequence[Example]) -> list[float]:
            try:
                return await scorer.score(examples)
            except ClusterError as error:  # nothing can be served without its processes
                failures.append(error)
                end.set()
                raise

        chat = experiment.data.chat
        routes = reward_routes(experiment.policy, endpoint, chat=chat, score=score)
        # After Ray's start, which takes the signals for itself.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end.set)
        announce(await stack.enter_async_context(answering(endpoint, routes)))
        await end.wait()
        if failures:
            raise failures[0]


async def _open(experiment: Experiment, stack: AsyncExitStack) -> RewardScorer:
    """The processes, which end with the stack."""
    policy, cluster = experiment.policy, experiment.cluster
    processes = [request for request in worker_requests(experiment) if request.group == "policy"]
    runtime = stack.enter_context(ClusterRuntime(cluster, processes))
    placement = await runtime.reserve()
    stack.callback(placement.release)
    spec = ModelSpec("policy", "policy", policy, trains=False)
    group = await stack.enter_async_context(Starter(experiment, placement).model(spec))
    stack.push_async_callback(group.shutdown)
    model = ModelHandle(group, policy, cluster.deadlines, trains=False)
    return RewardScorer(model, policy.layout.fewest_units)
