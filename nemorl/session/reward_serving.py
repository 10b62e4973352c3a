"""A reward model of its own: the processes that hold it, and the HTTP endpoint over them.

The model runs in the same worker as policies and critics do (`PolicyHost`), so every family and layout can be
served, and an answer's score is the one that training a policy or the reward model itself computes. It holds
no optimizer.
"""

import asyncio
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import ray
from aiohttp import web
from torch import Tensor

from nemorl.cluster.errors import ClusterError
from nemorl.cluster.placement import worker_requests
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.endpoint import EndpointConfig
from nemorl.config.experiment import Experiment
from nemorl.data.examples import STAND_IN, Example
from nemorl.data.packed import PackedBatch
from nemorl.data.prompts import prompts_of
from nemorl.data.tokenizer import load_tokenizer
from nemorl.serve.rewards import ServedRewards, make_reward_app
from nemorl.serve.server import Listening, answering

from .model_group import ModelGroup
from .shard import SequencePlace
from .start import Starter


@dataclass(frozen=True)
class LastValue:
    """What a scalar head says after the last token of each sequence."""

    def __call__(self, batch: PackedBatch) -> Tensor:
        """[S]"""
        assert batch.values is not None, "values are computed first"
        return batch.values[batch.cu_seqlens[1:].long() - 1]


@dataclass(frozen=True)
class RewardScorer:
    """Scores of examples by a group that holds a reward model. Belongs to one event loop."""

    model: ModelGroup
    units: int  # a batch of a multiple of so many divides over the group

    async def score(self, examples: Sequence[Example]) -> list[float]:
        """One number each."""
        sequences = [*examples, *[STAND_IN] * (-len(examples) % self.units)]
        store = ray.put(sequences)
        await self.model.load(
            [SequencePlace(store, row, e.num_tokens) for row, e in enumerate(sequences)], kind="examples"
        )
        await self.model.values()
        return (await self.model.sequence_figures(LastValue()))[: len(examples)]


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

        policy = experiment.policy
        tokenizer = load_tokenizer(policy)
        served = ServedRewards(
            name=endpoint.model_name or policy.model_path.absolute().name,
            score=score,
            tokenizer=tokenizer,
            prompts=prompts_of(tokenizer, experiment.data.chat),
            max_length=policy.max_sequence_length,
            timeout=endpoint.timeout,
        )

        def app_of(api_key: str) -> web.Application:
            return make_reward_app(
                served,
                api_key=api_key,
                max_concurrent=endpoint.max_concurrent_requests,
                max_body_bytes=endpoint.max_body_megabytes * 2**20,
            )

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
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nemorl-reward-"))
    group = await Starter(experiment, placement).frozen_model(policy, Path(folder))
    stack.push_async_callback(group.shutdown_async)
    model = ModelGroup(group, policy, cluster.deadlines, trains=False)
    return RewardScorer(model, policy.layout.fewest_units)
