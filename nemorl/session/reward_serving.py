"""A reward model of its own: the processes that hold it, and the HTTP endpoint over them.

The model runs in the same worker as policies and critics do (`PolicyHost`), so every family and layout can be
served, and an answer's score is the one that training a policy or the reward model itself computes. It holds
no optimizer.
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
from nemorl.serve.server import Listening, answering

from .model_group import ModelGroup
from .scoring import RewardScorer, reward_app
from .start import Starter


def serve_rewards(experiment: Experiment, tell: Callable[[Listening], None]) -> None:
    """Start the reward model of an experiment and answer over HTTP until the process is told to end.

    `tell` hears where, once that works. Raises NemorlError.
    """
    asyncio.run(_serve(experiment, tell))


async def _serve(experiment: Experiment, tell: Callable[[Listening], None]) -> None:
    endpoint = experiment.generation.endpoint or EndpointConfig()
    async with AsyncExitStack() as stack:
        scorer = await _open(experiment, stack)
        end, failures = asyncio.Event(), []

        async def score(examples: Sequence[Example]) -> list[float]:
            try:
                return await scorer.score(examples)
            except ClusterError as error:  # without its processes there is nothing to serve
                failures.append(error)
                end.set()
                raise

        chat = experiment.data.chat
        app_of = reward_app(experiment.policy, endpoint, chat=chat, score=score)
        # After Ray's start, which takes the signals for itself.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end.set)
        tell(await stack.enter_async_context(answering(endpoint, app_of)))
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
    stack.push_async_callback(group.shutdown_async)
    model = ModelGroup(group, policy, cluster.deadlines, trains=False)
    return RewardScorer(model, policy.layout.fewest_units)
