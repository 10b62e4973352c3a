"""Reward models in processes of the run, and the endpoints by which rollout workers call them.

Rollout workers score at any time, and a group of processes takes one call at a time. Between them is the
endpoint of `nemorl serve reward`, in the driver's process and with its own key, which batches requests.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import ray

from nemorl.cluster.errors import ClusterError
from nemorl.config.environment import LocalModelRewardConfig, ModelRewardConfig, RewardConfig
from nemorl.config.generation import EndpointConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.examples import PLACEHOLDER, Example
from nemorl.data.shards import SequencePlace
from nemorl.data.tokenizer import load_tokenizer, prompts_of
from nemorl.serve.app import AddRoutes
from nemorl.serve.requests import ApiError
from nemorl.serve.rewards import Score, ServedRewards

from .handles import DeviceScheduler, ModelHandle


@dataclass(frozen=True)
class RewardScorer:
    """Scores of examples by a group that holds a reward model. Belongs to one event loop."""

    model: ModelHandle
    units: int  # a batch whose size is a multiple of this divides over the group
    devices: DeviceScheduler | None = None  # if the group shares the policy's

    async def score(self, examples: Sequence[Example]) -> list[list[float]]:
        """The scalar head's values after the tokens of the loss mask, of each example."""
        sequences = [*examples, *[PLACEHOLDER] * (-len(examples) % self.units)]
        store = ray.put(sequences)
        places = [SequencePlace(store, row, e.num_tokens) for row, e in enumerate(sequences)]
        turn = nullcontext() if self.devices is None else self.devices.borrow_during_generation(self.model)

        async def compute() -> list[list[float]]:
            await self.model.load(places, kind="examples")
            await self.model.values()
            return (await self.model.marked_values())[: len(examples)]

        async with turn:
            return await self.model.outlasting(compute)


def reporting_failures(scorer: RewardScorer) -> Score:
    """The scorer for an endpoint, which reports the failure of its processes to rollout workers.

    With a status for which they do not try again: restarts have failed.
    """

    async def score(examples: Sequence[Example]) -> list[list[float]]:
        try:
            return await scorer.score(examples)
        except ClusterError as error:
            raise ApiError(410, str(error), kind="server_error") from error

    return score


def reward_routes(config: PolicyConfig, endpoint: EndpointConfig, *, chat: bool, score: Score) -> AddRoutes:
    """Return the routes over a reward model. Raises TokenizerError."""
    tokenizer, name = load_tokenizer(config), endpoint.model_name or config.model_path.absolute().name
    prompts, max_length = prompts_of(tokenizer, chat), config.max_sequence_length
    return ServedRewards(name, score, tokenizer, prompts, max_length, endpoint.timeout).add_routes


def reward_by_url(reward: RewardConfig, url: str, key_variable: str) -> ModelRewardConfig:
    """A reward model as rollout workers call it, at the address of its endpoint."""
    assert isinstance(reward, LocalModelRewardConfig)
    kept = reward.model_dump(
        include={"weight", "deadline", "max_concurrent", "on_error", "batch_size", "steps"}
    )
    name, model = reward.metric, reward.model_path.absolute().name
    return ModelRewardConfig(kind="model", name=name, url=url, model=model, api_key_env=key_variable, **kept)
