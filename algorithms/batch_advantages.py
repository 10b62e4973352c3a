"""Advantages that the whole batch scales, and those of several rewards."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemorl.config.algorithm.advantages import (
    GdpoAdvantageConfig,
    GroupThenBatchAdvantageConfig,
    Over,
    ReinforceAdvantageConfig,
)
from nemorl.rollout.groups import GroupSummary

from .group_advantages import all_equal, rewards, sampled_tokens, standardized


def reinforce(groups: Sequence[GroupSummary], config: ReinforceAdvantageConfig) -> list[list[float]]:
    """The reward; less the mean of the batch; or that over the batch's standard deviation as well.

    Williams 1992, "Simple statistical gradient-following algorithms", with a constant baseline.
    """
    r = _flat([rewards(group) for group in groups])
    if config.normalization == "none":
        return _grouped(r, groups)
    counts = _counts(groups, config.over)
    if config.normalization == "mean":
        return _grouped(r - _mean(r, counts), groups)
    return _grouped(whitened(r, counts, config.epsilon), groups)


def group_then_batch(
    groups: Sequence[GroupSummary], config: GroupThenBatchAdvantageConfig
) -> list[list[float]]:
    """`A = (r - mean of the group)`, then `(A - mean) / (std + epsilon)` over the batch.

    REINFORCE++-baseline, Hu et al. 2025, arXiv 2501.03262. Unlike GRPO's, the scale is the same
    for all groups. Over tokens, as there, a long trajectory counts more in mean and deviation.
    """
    centred = _flat([r - r.mean() for r in map(rewards, groups) if len(r)])
    return _grouped(whitened(centred, _counts(groups, config.over), config.epsilon), groups)


def gdpo(
    groups: Sequence[GroupSummary], config: GdpoAdvantageConfig, reward_weights: Mapping[str, float]
) -> list[list[float]]:
    """Each reward by itself as in GRPO, then summed by its weight, then whitened over the batch.

    GDPO, Liu et al. 2026, arXiv 2601.05242: differences in one reward do not vanish in the sum of
    all. A reward that does not apply to a trajectory adds 0 to it and does not enter the group's mean of it.
    Without `whiten_batch` the sum stays as it is.
    """
    summed = _flat([_sum_of_rewards(group, config.epsilon, reward_weights) for group in groups])
    if config.whiten_batch:
        summed = whitened(summed, torch.ones_like(summed), config.epsilon)
    return _grouped(summed, groups)


def _sum_of_rewards(group: GroupSummary, epsilon: float, reward_weights: Mapping[str, float]) -> Tensor:
    """[members] float64."""
    summed = torch.zeros(len(group.trajectories), dtype=torch.float64)
    for name in sorted({name for t in group.trajectories for name in t.rewards}):
        index = [place for place, t in enumerate(group.trajectories) if name in t.rewards]
        paid = torch.tensor([group.trajectories[i].rewards[name] for i in index], dtype=torch.float64)
        summed[index] += reward_weights[name] * standardized(paid, epsilon)
    return summed


def whitened(values: Tensor, counts: Tensor, epsilon: float) -> Tensor:
    """`(v - mean) / (std + epsilon)`, where each value stands for `counts` equal ones; unbiased.

    All 0 where the values are equal. verl's `masked_whiten` is the same but for epsilon, which it adds to
    the variance; OpenRLHF divides the variance by n.
    """
    if all_equal(values):
        return torch.zeros_like(values)
    centred = values - _mean(values, counts)
    variance = (counts * centred.square()).sum() / (counts.sum() - 1).clamp(min=1)
    return centred / (variance.sqrt() + epsilon)


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    return (counts * values).sum() / counts.sum().clamp(min=1)


def _counts(groups: Sequence[GroupSummary], over: Over) -> Tensor:
    """How often each trajectory counts: [S] float64."""
    tokens = _flat([sampled_tokens(group) for group in groups])
    return tokens if over == "tokens" else torch.ones_like(tokens)


def _flat(of_groups: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *of_groups])


def _grouped(values: Tensor, groups: Sequence[GroupSummary]) -> list[list[float]]:
    return [part.tolist() for part in values.split([len(group.trajectories) for group in groups])]
