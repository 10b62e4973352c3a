"""Reward models in processes of the run, and the endpoints by which rollout workers call them.

Rollout workers score while they sample, at any time, and a group of processes takes one call at a time.
Between them is the endpoint of `nemorl serve reward`: in the driver's process, at an address of this machine
(or of the cluster, if workers on other nodes call it) and with a separate key. It batches simultaneous
requests.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import ray
from torch import Tensor

from nemorl.cluster.errors import ClusterError
from nemorl.config.environment import LocalModelRewardConfig, ModelRewardConfig, RewardConfig
from nemorl.config.facts import group_name
from nemorl.config.generation import EndpointConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.examples import PLACEHOLDER, Example
from nemorl.data.packed import PackedBatch
from nemorl.data.shards import SequencePlace
from nemorl.data.tokenizer import load_tokenizer, prompts_of
from nemorl.serve.app import AddRoutes, Listening
from nemorl.serve.requests import ApiError
from nemorl.serve.rewards import Score, ServedRewards

from .devices import DeviceScheduler
from .handles import ModelHandle


@dataclass(frozen=True)
class Scoring:
    """The rewards as rollout workers receive them."""

    rewards: tuple[RewardConfig, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # with the keys of endpoints


@dataclass(frozen=True)
class LastValue:
    """The scalar head's value after the last token of each sequence."""

    def __call__(self, batch: PackedBatch) -> Tensor:
        """[S]"""
        assert batch.values is not None, "compute the values first"
        return batch.values[batch.cu_seqlens[1:].long() - 1]


@dataclass(frozen=True)
class RewardScorer:
    """Scores of examples by a group that holds a reward model. Belongs to one event loop."""

    model: ModelHandle
    units: int  # a batch whose size is a multiple of this divides over the group
    devices: DeviceScheduler | None = None  # if the group shares the policy's

    async def score(self, examples: Sequence[Example]) -> list[float]:
        """One number each."""
        sequences = [*examples, *[PLACEHOLDER] * (-len(examples) % self.units)]
        store = ray.put(sequences)
        places = [SequencePlace(store, row, e.num_tokens) for row, e in enumerate(sequences)]
        async with (
            self.devices.borrow_during_generation(self.model) if self.devices is not None else nullcontext()
        ):
            await self.model.load(places, kind="examples")
            await self.model.values()
            return (await self.model.sequence_metrics(LastValue()))[: len(examples)]


def reporting_failures(scorer: RewardScorer) -> Score:
    """The scorer for an endpoint, which reports the failure of its processes to rollout workers."""

    async def score(examples: Sequence[Example]) -> list[float]:
        try:
            return await scorer.score(examples)
        except ClusterError as error:
            raise ApiError(503, str(error), kind="server_error") from error

    return score


def reward_routes(config: PolicyConfig, endpoint: EndpointConfig, *, chat: bool, score: Score) -> AddRoutes:
    """Return the routes over a reward model. Raises TokenizerError."""
    tokenizer = load_tokenizer(config)
    return ServedRewards(
        name=endpoint.model_name or config.model_path.absolute().name,
        score=score,
        tokenizer=tokenizer,
        prompts=prompts_of(tokenizer, chat),
        max_length=config.max_sequence_length,
        timeout=endpoint.timeout,
    ).add_routes


def scored_by_url(
    rewards: Sequence[RewardConfig], listening: Mapping[str, Listening], endpoint: EndpointConfig
) -> Scoring:
    """The rewards with an address in place of each group that has an endpoint, and the keys of these."""
    by_url: list[RewardConfig] = []
    environment = {}
    for place, reward in enumerate(rewards):
        if isinstance(reward, LocalModelRewardConfig):
            at, variable = listening[group_name(f"rewards.{place}")], f"NEMORL_REWARD_KEY_{place}"
            environment[variable] = at.api_key
            by_url.append(_by_url(reward, at.url, variable, endpoint))
        else:
            by_url.append(reward)
    return Scoring(tuple(by_url), environment)


def _by_url(
    reward: LocalModelRewardConfig, url: str, variable: str, endpoint: EndpointConfig
) -> ModelRewardConfig:
    return ModelRewardConfig(
        kind="model",
        name=reward.metric,
        weight=reward.weight,
        deadline=reward.deadline,
        max_concurrent=reward.max_concurrent,
        on_error=reward.on_error,
        url=url,
        model=endpoint.model_name or reward.model_path.absolute().name,
        api_key_env=variable,
        batch_size=reward.batch_size,
    )
