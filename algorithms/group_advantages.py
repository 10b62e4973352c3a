"""Advantages within each group: what a trajectory is beside the others of its task.

Each function takes the groups of a batch and gives a list for each, of a number for each trajectory. Where
a group is compared with itself, one of a single member, or of equal rewards, has advantage 0 exactly. In verl
a single member has its raw reward: that is the advantage `reinforce` with `normalization: none` here, for
groups of one; a member whose others failed has 0 all the same.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nemorl.config.algorithm.advantages import (
    GpgAdvantageConfig,
    GroupAdvantageConfig,
    PassAtKAdvantageConfig,
)
from nemorl.rollout.groups import GroupSummary


def group_relative(groups: Sequence[GroupSummary], config: GroupAdvantageConfig) -> list[list[float]]:
    """`A = (r - mean) / (std + epsilon)` with the mean and the unbiased standard deviation of the group.

    Shao et al. 2024, arXiv 2402.03300; without `normalize` it is Dr. GRPO's (Liu et al. 2025,
    arXiv 2503.20783). With `leave_one_out` the mean is that of the others (RLOO, Ahmadian et al. 2024, arXiv
    2402.14740). Epsilon is 1e-6 as in verl; TRL adds 1e-4, OpenRLHF 1e-9.
    """
    return [_relative(rewards(group), config).tolist() for group in groups]


def _relative(r: Tensor, config: GroupAdvantageConfig) -> Tensor:
    if all_equal(r):
        return torch.zeros_like(r)
    centred = r - r.mean()
    if config.leave_one_out:
        centred = centred * len(r) / (len(r) - 1)
    return centred / (r.std() + config.epsilon) if config.normalize else centred


def remax(groups: Sequence[GroupSummary]) -> list[list[float]]:
    """`A = r - r_greedy`: the baseline is the reward of a greedy sample of the same task.

    Li et al. 2023, arXiv 2310.10505. Where the greedy sample failed there is no baseline, and
    the group has advantage 0. A group of one can learn, and so can one of equal rewards.
    """
    advantages = []
    for group in groups:
        greedy = group.greedy
        sound = greedy is not None and greedy.error is None
        advantages.append([t.reward - greedy.reward if greedy and sound else 0.0 for t in group.trajectories])
    return advantages


def optimal_baseline(groups: Sequence[GroupSummary]) -> list[list[float]]:
    """`A = r - b` with `b = sum(l r) / sum(l)`, where l is the number of sampled tokens.

    OPO, Hao et al. 2025, arXiv 2505.23585: of all baselines that are equal for a group this one has the least
    variance, when the norm of a trajectory's gradient grows with its length.
    """
    return [_less_optimal_baseline(group) for group in groups]


def _less_optimal_baseline(group: GroupSummary) -> list[float]:
    r, lengths = rewards(group), sampled_tokens(group)
    if all_equal(r) or not lengths.sum():
        return [0.0] * len(r)
    return (r - (lengths * r).sum() / lengths.sum()).tolist()


def gpg(groups: Sequence[GroupSummary], config: GpgAdvantageConfig) -> list[list[float]]:
    """`A = alpha (r - mean)` with `alpha = B / (B - M)`, where M of the B groups have equal rewards.

    GPG, Chu et al. 2025, arXiv 2504.02546: groups without a gradient do not thin out that of the
    others. With `normalize` divided by the standard deviation of the group. (verl counts trajectories whose
    reward is not 0 in place of the groups that teach.)
    """
    inner = GroupAdvantageConfig(normalize=config.normalize, epsilon=config.epsilon)
    teaching = sum(not all_equal(rewards(group)) for group in groups)
    alpha = len(groups) / max(teaching, 1)
    return [(alpha * _relative(rewards(group), inner)).tolist() for group in groups]


def pass_at_k(groups: Sequence[GroupSummary], config: PassAtKAdvantageConfig) -> list[list[float]]:
    """The expectation of GRPO's advantage when each k of the group's n trajectories are paid as one.

    Chen et al. 2025, arXiv 2508.10751. With n- trajectories that do not pass,
    `R = 1 - C(n-, k) / C(n, k)` is the mean of the paid sets and `s = sqrt(R (1 - R))` their deviation; who
    passes has `(1 - R) / s`, who does not `(1 - R - C(n- - 1, k - 1) / C(n - 1, k - 1)) / s`. Where every set
    is paid alike, and where fewer than k trajectories are left, it is 0.
    """
    return [_pass_at_k(group, config) for group in groups]


def _pass_at_k(group: GroupSummary, config: PassAtKAdvantageConfig) -> list[float]:
    passed = [t.reward >= config.pass_reward for t in group.trajectories]
    n, failed, k = len(passed), passed.count(False), config.k
    if n < k or math.comb(failed, k) in (0, math.comb(n, k)):
        return [0.0] * n
    mean = 1 - math.comb(failed, k) / math.comb(n, k)
    deviation = math.sqrt(mean * (1 - mean))
    right = (1 - mean) / deviation
    wrong = (1 - mean - math.comb(failed - 1, k - 1) / math.comb(n - 1, k - 1)) / deviation
    return [right if ok else wrong for ok in passed]


def rewards(group: GroupSummary) -> Tensor:
    """[members] float64."""
    return torch.tensor([t.reward for t in group.trajectories], dtype=torch.float64)


def sampled_tokens(group: GroupSummary) -> Tensor:
    """[members] float64."""
    return torch.tensor([t.num_sampled for t in group.trajectories], dtype=torch.float64)


def all_equal(values: Tensor) -> bool:
    """Whether there is nothing to compare; of one value, or none, there is not."""
    return len(values) < 2 or bool((values == values[0]).all())


def standardized(values: Tensor, epsilon: float) -> Tensor:
    """Less their mean, over their unbiased standard deviation; exactly 0 where all are equal."""
    return _relative(values, GroupAdvantageConfig(epsilon=epsilon))
