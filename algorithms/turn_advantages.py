"""Advantages of single turns, for conversations in which the environment pays on the way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemorl.config.algorithm.advantages import TurnAdvantageConfig
from nemorl.rollout.groups import GroupSummary, TrajectorySummary

from .group_advantages import all_equal, standardized


def turn_relative(
    groups: Sequence[GroupSummary], config: TurnAdvantageConfig
) -> list[list[tuple[float, ...]]]:
    """One advantage for each turn of each trajectory.

    MT-GRPO, Zeng et al. 2025, arXiv 2505.11821: the last turn has the advantage of the outcome in
    its group; turn k before it has that of what is paid for it among the k-th turns of the group that are not
    last ones, plus `outcome_weight` times that of the outcome. The outcome is the reward less what was paid
    for turns before the last one. With `discount` d a turn also earns what is paid j turns on, times d^j, as
    in returns (Ding et al. 2025, arXiv 2511.14846).
    """
    return [_of_group(group.trajectories, config) for group in groups]


def _of_group(
    trajectories: Sequence[TrajectorySummary], config: TurnAdvantageConfig
) -> list[tuple[float, ...]]:
    earned = [_earned_on_the_way(t, config.discount) for t in trajectories]
    outcomes = [t.reward - sum(t.turn_rewards[:-1]) for t in trajectories]
    of_outcome = _relative(torch.tensor(outcomes, dtype=torch.float64), config).tolist()
    advantages = [
        [config.outcome_weight * outcome] * len(e) for outcome, e in zip(of_outcome, earned, strict=True)
    ]
    for turn in range(max(map(len, earned), default=0)):
        rows = [row for row, e in enumerate(earned) if len(e) > turn]
        paid = torch.tensor([earned[row][turn] for row in rows], dtype=torch.float64)
        for row, value in zip(rows, _relative(paid, config).tolist(), strict=True):
            advantages[row][turn] += value
    return [
        (*on_the_way, outcome) if t.num_turns else ()
        for on_the_way, outcome, t in zip(advantages, of_outcome, trajectories, strict=True)
    ]


def _earned_on_the_way(trajectory: TrajectorySummary, discount: float) -> list[float]:
    """What each turn but the last one is paid, with what comes after it: one number a turn."""
    earned: list[float] = []
    later = 0.0
    for paid in reversed(trajectory.turn_rewards[:-1]):
        later = paid + discount * later
        earned.insert(0, later)
    return earned


def _relative(values: Tensor, config: TurnAdvantageConfig) -> Tensor:
    if config.normalize or all_equal(values):
        return standardized(values, config.epsilon)
    return values - values.mean()
