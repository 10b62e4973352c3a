"""How good the trajectories of a batch were beside what could be expected, by the name of the estimator.

All take groups and give numbers: one for each trajectory, or one for each of its turns. The groups hold what
counts, without failed trajectories and dropped groups. Advantages that differ from token to token are made
where the tokens are (`token_advantages.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from nemorl.config.algorithm.advantages import (
    CustomAdvantageConfig,
    GdpoAdvantageConfig,
    GpgAdvantageConfig,
    GroupAdvantageConfig,
    GroupThenBatchAdvantageConfig,
    OfGroupsConfig,
    OptimalBaselineAdvantageConfig,
    PassAtKAdvantageConfig,
    ReinforceAdvantageConfig,
    RemaxAdvantageConfig,
    TurnAdvantageConfig,
)
from nemorl.data.batches import Advantage
from nemorl.rollout.groups import GroupSummary

from .batch_advantages import gdpo, group_then_batch, reinforce
from .custom import own_advantages
from .group_advantages import gpg, group_relative, optimal_baseline, pass_at_k, remax
from .turn_advantages import turn_relative

Estimator = Callable[[Sequence[GroupSummary]], Sequence[Sequence[Advantage]]]


def estimator(config: OfGroupsConfig, reward_weights: Mapping[str, float]) -> Estimator:
    """From groups to the advantages of their trajectories; `reward_weights` are of the rewards by name.

    Raises OwnPartError where a function of the user's cannot be found.
    """
    match config:
        case GroupAdvantageConfig():
            return partial(group_relative, config=config)
        case RemaxAdvantageConfig():
            return remax
        case OptimalBaselineAdvantageConfig():
            return optimal_baseline
        case GpgAdvantageConfig():
            return partial(gpg, config=config)
        case PassAtKAdvantageConfig():
            return partial(pass_at_k, config=config)
        case ReinforceAdvantageConfig():
            return partial(reinforce, config=config)
        case GroupThenBatchAdvantageConfig():
            return partial(group_then_batch, config=config)
        case GdpoAdvantageConfig():
            return partial(gdpo, config=config, reward_weights=reward_weights)
        case TurnAdvantageConfig():
            return partial(turn_relative, config=config)
        case CustomAdvantageConfig():
            return own_advantages(config)
