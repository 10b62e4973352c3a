"""HTTP endpoints: over a run's engines, over engines alone, and over a reward model.

A reward model runs in `PolicyWorker`, without an optimizer: every family and layout can be served, and scores
are those of training.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from nemorl.cluster.errors import ClusterError
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec
from nemorl.config.generation import EndpointConfig
from nemorl.data.examples import Example
from nemorl.data.tokenizer import load_tokenizer
from nemorl.generation.router import Replica, Router, RouterMetrics
from nemorl.serve.app import Listening, answering, event_at_signals, listening
from nemorl.serve.sampling import Served

from .scoring import RewardScorer, reward_routes
from .session import Starter, open_engines, reserved

_POLL_SECONDS = 1.0  # between two checks whether an engine is left


def served(experiment: Experiment, endpoint: EndpointConfig, router: Router) -> Served:
    """The model and router that an endpoint serves. Raises TokenizerError."""
    policy, tokenizer = experiment.policy, load_tokenizer(experiment.policy)
    name = endpoint.model_name or policy.model_path.absolute().name
    return Served(router, tokenizer, name, policy.max_sequence_length, endpoint.timeout)


class EndpointHost:
    """The endpoint of a run, in its own process. Belongs to one event loop."""

    def __init__(self, experiment: Experiment, engines: Sequence[Replica]) -> None:
        assert experiment.generation.endpoint is not None
        self._config, self._open = experiment.generation.endpoint, AsyncExitStack()
        self.router = Router(list(engines), waits=True)
        self._served = served(experiment, self._config, self.router)

    async def listen(self) -> Listening:
        """Raises RunError when the address is not available."""
        return await self._open.enter_async_context(listening(self._config, self._served))

    async def close(self) -> None:
        await self._open.aclose()


@dataclass(frozen=True)
class _LocalRouter:
    router: Router

    async def take_metrics(self, seconds: float) -> list[RouterMetrics]:
        return [self.router.take_metrics()]

    async def lost_replicas(self, seconds: float) -> list[dict[str, str]]:
        return [self.router.lost_replicas()]

    async def add(self, replica: Replica, seconds: float) -> None:
        self.router.add(replica)

    async def remove(self, name: str, seconds: float) -> None:
        self.router.remove(name)

    async def give_up(self, causes: Mapping[str, str], seconds: float) -> None:
        self.router.give_up(causes)


async def serve(experiment: Experiment, announce: Callable[[Listening], None]) -> None:
    """Start the engines of an experiment and answer over HTTP until the process receives SIGINT or SIGTERM.

    `announce` receives the address once the endpoint answers. Raises NemorlError, among them NoReplicaLeft.
    """
    endpoint = experiment.generation.endpoint or EndpointConfig()
    async with AsyncExitStack() as stack:
        replicas = await stack.enter_async_context(open_engines(experiment))
        router = Router([engine.as_replica() for engine in replicas.engines], waits=True)
        replicas.connect(_LocalRouter(router))
        end = event_at_signals()
        announce(await stack.enter_async_context(listening(endpoint, served(experiment, endpoint, router))))
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), _POLL_SECONDS)
                return
            replicas.check_watch()
            replicas.require_return()


async def serve_rewards(experiment: Experiment, announce: Callable[[Listening], None]) -> None:
    """Start an experiment's reward model and answer like `serve`. Raises NemorlError."""
    policy, endpoint = experiment.policy, experiment.generation.endpoint or EndpointConfig()
    async with AsyncExitStack() as stack:
        placement = await stack.enter_async_context(reserved(experiment, {"policy"}))
        spec = ModelSpec("policy", "policy", policy, trains=False)
        model = await Starter(experiment, placement, stack).model(spec)
        scorer = RewardScorer(model, policy.layout.fewest_units)
        end, failures = event_at_signals(), []

        async def score(examples: Sequence[Example]) -> list[list[float]]:
            try:
                return await scorer.score(examples)
            except ClusterError as error:  # nothing can be served without its processes
                failures.append(error)
                end.set()
                raise

        routes = reward_routes(policy, endpoint, chat=experiment.data.chat, score=score)
        announce(await stack.enter_async_context(answering(endpoint, routes)))
        await end.wait()
        if failures:
            raise failures[0]
