"""Reward models of a run's own: groups of processes that hold them, and how rollout workers ask.

Rollout workers score while they sample, each at its own time, and a group of processes takes one call at a
time. Between them stands what `nemorl serve reward` is: an endpoint in the driver's process, on this machine
(or at its address in the cluster, where some ask from other nodes) and with a key of its own, which puts
together what is asked at the same time.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import ray
from aiohttp import web
from torch import Tensor

from nemorl.cluster.errors import ClusterError
from nemorl.config.environment import LocalModelRewardConfig, ModelRewardConfig, RewardConfig
from nemorl.config.facts import reward_group
from nemorl.config.generation import EndpointConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.examples import PLACEHOLDER, Example
from nemorl.data.packed import PackedBatch
from nemorl.data.prompts import prompts_of
from nemorl.data.tokenizer import load_tokenizer
from nemorl.serve.app import AppOf, Listening
from nemorl.serve.requests import ApiError
from nemorl.serve.rewards import Score, ServedRewards, make_reward_app

from .devices import DeviceScheduler
from .handles import ModelHandle
from .shard import SequencePlace


@dataclass(frozen=True)
class Scoring:
    """What rollout workers are told of rewards."""

    rewards: tuple[RewardConfig, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # with the keys of endpoints


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

    model: ModelHandle
    units: int  # a batch of a multiple of so many divides over the group
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


def telling(scorer: RewardScorer) -> Score:
    """For rollout workers of the same run, who are told what became of the processes."""

    async def score(examples: Sequence[Example]) -> list[float]:
        try:
            return await scorer.score(examples)
        except ClusterError as error:
            raise ApiError(503, str(error), kind="server_error") from error

    return score


def reward_app(config: PolicyConfig, endpoint: EndpointConfig, *, chat: bool, score: Score) -> AppOf:
    """The application over a reward model, by its key. Raises TokenizerError."""
    tokenizer = load_tokenizer(config)
    served = ServedRewards(
        name=endpoint.model_name or config.model_path.absolute().name,
        score=score,
        tokenizer=tokenizer,
        prompts=prompts_of(tokenizer, chat),
        max_length=config.max_sequence_length,
        timeout=endpoint.timeout,
    )

    def app_of(api_key: str) -> web.Application:
        return make_reward_app(
            served,
            api_key=api_key,
            max_concurrent=endpoint.max_concurrent_requests,
            max_body_bytes=endpoint.max_body_megabytes * 2**20,
        )

    return app_of


def asked_by_url(
    rewards: Sequence[RewardConfig], listening: Mapping[str, Listening], endpoint: EndpointConfig
) -> Scoring:
    """The rewards with an address in place of every group that listens, and the keys of these."""
    told: list[RewardConfig] = []
    environment = {}
    for place, reward in enumerate(rewards):
        if isinstance(reward, LocalModelRewardConfig):
            at, variable = listening[reward_group(place)], f"NEMORL_REWARD_KEY_{place}"
            environment[variable] = at.api_key
            told.append(_by_url(reward, at.url, variable, endpoint))
        else:
            told.append(reward)
    return Scoring(tuple(told), environment)


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
