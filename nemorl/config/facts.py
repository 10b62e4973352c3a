"""Which models a run holds, each in processes of its own: a fact that placement, plans and sessions share.

What several checks ask about an experiment.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from .algorithm import AlgorithmConfig
from .auxiliary import CriticConfig, teachers_held
from .data import DataConfig, DatasetConfig
from .environment import LocalModelRewardConfig
from .experiment import Experiment
from .policy import PolicyConfig


def generates(algorithm: AlgorithmConfig) -> bool:
    """Whether the run samples at all; what learns from data does so for validation only."""
    return algorithm.generates


def datasets(data: DataConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Each dataset that a loss may be computed of, with the path of its section."""
    yield "data.train", data.train
    if data.validation is not None:
        yield "data.validation", data.validation


def held_out(data: DataConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Each dataset that is only measured, with the path of its section."""
    if data.validation is not None:
        yield "data.validation", data.validation
    yield from ((f"data.validation_sets.{name}", dataset) for name, dataset in data.validation_sets.items())


def acted_on(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """The datasets whose tasks go through the environment: SFT learns its training tasks without it."""
    if algorithm.online:
        yield "data.train", data.train
    yield from held_out(data)


def is_address(url: str) -> bool:
    """Whether requests can go to paths below it."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not re.search(r"\s", url)
    except ValueError:
        return False


@dataclass(frozen=True)
class ModelSpec:
    """One model of a run and the group of processes that holds it."""

    name: str  # of the group
    section: str  # of the experiment, which messages name
    config: PolicyConfig
    trains: bool = True
    on_policy_devices: bool = False  # it takes turns with the policy, where that runs
    scores: bool = False  # a reward model, which is there wherever something is sampled


def models_of(experiment: Experiment) -> tuple[ModelSpec, ...]:
    """The policy first. A reference is among them only where it has processes of its own."""
    policy = experiment.policy
    found = [ModelSpec("policy", "policy", policy)]
    if experiment.algorithm.keeps_critic:
        critic = experiment.critic or CriticConfig()
        config = critic.worker_config(policy)
        found.append(ModelSpec("critic", "critic", config, on_policy_devices=critic.devices == "policy"))
    if experiment.algorithm.keeps_reference and experiment.reference is not None:
        reference = experiment.reference
        config = reference.worker_config(policy)
        shares = reference.devices == "policy"
        found.append(ModelSpec("reference", "reference", config, False, shares))
    if experiment.algorithm.keeps_teachers:
        for name, teacher in teachers_held(experiment.teachers).items():
            config, shares = teacher.worker_config(policy), teacher.devices == "policy"
            found.append(ModelSpec(teacher_group(name), f"teachers.{name}", config, False, shares))
    for place, reward in enumerate(experiment.rewards):
        if isinstance(reward, LocalModelRewardConfig):
            config, shares = reward.worker_config(policy), reward.devices == "policy"
            name, section = reward_group(place), f"rewards.{place}"
            found.append(ModelSpec(name, section, config, False, shares, scores=True))
    return tuple(found)


def reward_group(place: int) -> str:
    """The group of processes of the reward model that stands at this place of `rewards`."""
    return f"reward_{place}"


def teacher_group(name: str) -> str:
    """The group of processes of a teacher."""
    return f"teacher_{name}"
