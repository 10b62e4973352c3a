"""Which models a run holds, each in processes of its own: a fact that placement, plans and sessions share."""

from dataclasses import dataclass

from .auxiliary import CriticConfig, teachers_held
from .environment import LocalModelRewardConfig
from .experiment import Experiment
from .policy import PolicyConfig


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
