"""What can be filtered, and by what."""

import difflib
from collections.abc import Iterator

from nemorl.config.algorithm import AlgorithmConfig, OnlineBase
from nemorl.config.env import EnvConfig
from nemorl.config.environment import RewardConfig
from nemorl.errors import Violation

from .metrics import reward_names

_DROPPING = "drop_equal_rewards, min_mean_reward or max_mean_reward"


def filters_have_something_to_do(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Settings of dropping groups say nothing where none is dropped."""
    if not isinstance(algorithm, OnlineBase):
        return
    filters = algorithm.filters
    if filters.refill is not None and not filters.drops_groups:
        mend = f"no group is dropped that another could replace: set one of {_DROPPING}, or remove this"
        yield Violation("algorithm.filters.refill", filters.refill.model_dump(), mend)
    if filters.reward is not None and not filters.drops_groups and filters.keep_most_varied is None:
        mend = f"no group is dropped by it: set one of {_DROPPING} or keep_most_varied, or remove this"
        yield Violation("algorithm.filters.reward", filters.reward, mend)
    low, high = filters.min_mean_reward, filters.max_mean_reward
    if low is not None and high is not None and low > high:
        mend = (
            f"algorithm.filters.max_mean_reward is {high:g}, so no group would be left: take less than that"
        )
        yield Violation("algorithm.filters.min_mean_reward", low, mend)


def groups_can_vary(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """The rewards of a group of one are all equal."""
    if not isinstance(algorithm, OnlineBase) or algorithm.num_generations_per_prompt > 1:
        return
    filters = algorithm.filters
    mend = "in a group of one no reward differs: raise algorithm.num_generations_per_prompt, or remove this"
    if filters.drop_equal_rewards:
        yield Violation("algorithm.filters.drop_equal_rewards", True, mend)
    if filters.keep_most_varied is not None:
        yield Violation("algorithm.filters.keep_most_varied", filters.keep_most_varied, mend)


def filtered_reward_is_paid(
    algorithm: AlgorithmConfig, env: EnvConfig, rewards: tuple[RewardConfig, ...]
) -> Iterator[Violation]:
    """The reward by which groups are dropped is one of those that are paid."""
    if not isinstance(algorithm, OnlineBase) or algorithm.filters.reward is None:
        return
    name, known = algorithm.filters.reward, sorted(reward_names(env, rewards))
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        mend = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known) or 'no rewards'}"
        yield Violation("algorithm.filters.reward", name, f"no reward is called so: {mend}")
