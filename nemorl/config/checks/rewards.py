"""What the policy is paid for."""

import re
from collections.abc import Iterator

from nemorl.config.algorithm import AlgorithmConfig, OnPolicyDistillationConfig
from nemorl.config.data import DataConfig
from nemorl.config.environment import (
    CalculatorEnvConfig,
    EnvConfig,
    JudgeRewardConfig,
    RewardConfig,
    ServiceRewardBase,
    SingleTurnEnvConfig,
)
from nemorl.config.facts import generates, is_address
from nemorl.errors import Problem

from .metrics import reward_names

_METRICS = ("mean", "std", "of_greedy")


def something_is_rewarded(
    env: EnvConfig, rewards: tuple[RewardConfig, ...], algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """`single_turn` pays nothing of its own; a teacher is enough where nothing is measured."""
    unpaid = isinstance(algorithm, OnPolicyDistillationConfig) and not algorithm.validation.scheduled
    if not isinstance(env, SingleTurnEnvConfig) or not generates(algorithm) or unpaid:
        return
    if rewards and not any(reward.weight for reward in rewards):
        fix = "all weights are 0, so every reward would be 0: give one of them another"
        yield Problem("rewards.0.weight", rewards[0].weight, fix)
    elif not rewards:
        yield Problem(
            "rewards",
            [],
            "the environment `single_turn` pays nothing itself, so every reward would be 0: name a reward "
            "function, such as `[{function: exact_match}]`, or take another env",
        )


def reward_names_differ(env: EnvConfig, rewards: tuple[RewardConfig, ...]) -> Iterator[Problem]:
    """A metric can hold one reward; without a name a function is called by what stands after the colon."""
    taken = set(reward_names(env, ()))
    for place, reward in enumerate(rewards):
        name = reward.metric
        if name in _METRICS:
            fix = f"the metric reward/{name} is of all rewards together: give it another `name`"
            yield Problem(f"rewards.{place}.{reward.field}", getattr(reward, reward.field), fix)
        if name in taken:
            fix = f"another reward is named `{name}` already: remove one, or give it another `name`"
            yield Problem(f"rewards.{place}.{reward.field}", getattr(reward, reward.field), fix)
        taken.add(name)


def reward_addresses_are_whole(rewards: tuple[RewardConfig, ...]) -> Iterator[Problem]:
    """Requests go to paths below them."""
    for place, reward in enumerate(rewards):
        if isinstance(reward, ServiceRewardBase) and not is_address(reward.url):
            fix = "an address such as http://127.0.0.1:8000/v1 is wanted"
            yield Problem(f"rewards.{place}.url", reward.url, fix)


def judges_can_be_understood(rewards: tuple[RewardConfig, ...]) -> Iterator[Problem]:
    """A judge is shown what it judges, and what it says can be read."""
    for place, reward in enumerate(rewards):
        if isinstance(reward, JudgeRewardConfig):
            for field, fix in _of_judge(reward):
                yield Problem(f"rewards.{place}.{field}", getattr(reward, field), fix)


def _of_judge(judge: JudgeRewardConfig) -> Iterator[tuple[str, str]]:
    shown, other = (
        ("{completions}", "{completion}") if judge.ranks_groups else ("{completion}", "{completions}")
    )
    ranks = str(judge.ranks_groups).lower()
    if shown not in judge.prompt:
        yield "prompt", f"ranks_groups is {ranks}, so the judge sees answers where {shown} stands: put it in"
    elif other in judge.prompt:
        yield "prompt", f"ranks_groups is {ranks}, so nothing is put in place of {other}: take {shown}"
    if judge.max_score <= judge.min_score:
        yield "max_score", f"it is worth 1 and min_score, {judge.min_score:g}, is worth 0: set it above that"
    if judge.parser != "regex":
        if judge.pattern != JudgeRewardConfig.model_fields["pattern"].default:
            yield "pattern", "parser is `json`, which looks at no pattern: set it to regex, or remove this"
        return
    try:
        groups = re.compile(judge.pattern).groups
    except re.error as error:
        yield "pattern", f"this is no regular expression ({error})"
    else:
        if not groups:
            yield "pattern", "the number is its first group: put brackets around it"


def calculator_wants_chat(env: EnvConfig, data: DataConfig) -> Iterator[Problem]:
    """The calculator answers with messages of a tool, which plain text cannot tell from the policy's own."""
    if isinstance(env, CalculatorEnvConfig) and not data.chat:
        fix = "the environment `calculator` answers in messages of its own: set data.chat to true"
        yield Problem("data.chat", False, fix)
