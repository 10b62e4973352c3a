"""Advantages of trajectories, or of their turns, from the rewards of a batch.

Each estimator takes the groups of a batch, without failed trajectories and dropped groups, and returns a list
for each group, with a number for each trajectory or a tuple with one for each of its turns. Advantages that
differ between tokens are computed where the tokens are (`token_advantages.py`).

Estimators that compare the members of a group give exactly 0 to a group with a single member or with equal
rewards. In verl a single member has its raw reward: that is `reinforce` with `normalization: none` here, for
groups of one; a member whose others failed has 0 here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemorl.config.algorithm.advantages import (
    CustomAdvantageConfig,
    GdpoAdvantageConfig,
    GpgAdvantageConfig,
    GroupAdvantageConfig,
    GroupThenBatchAdvantageConfig,
    OfGroupsConfig,
    OptimalBaselineAdvantageConfig,
    Over,
    PassAtKAdvantageConfig,
    ReinforceAdvantageConfig,
    RemaxAdvantageConfig,
    TurnAdvantageConfig,
)
from nemorl.config.base import Config
from nemorl.data.packed import Advantage
from nemorl.rollout.collector import GroupSummary, TrajectorySummary

from .custom import own_advantages


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
    """The expectation of GRPO's advantage when each k of the group's n trajectories are rewarded as one.

    Chen et al. 2025, arXiv 2508.10751. With n- trajectories that do not pass,
    `R = 1 - C(n-, k) / C(n, k)` is the mean reward of the sets and `s = sqrt(R (1 - R))` their deviation; who
    passes has `(1 - R) / s`, who does not `(1 - R - C(n- - 1, k - 1) / C(n - 1, k - 1)) / s`. Where every set
    has the same reward, and where fewer than k trajectories are left, it is 0.
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
    """Each reward separately as in GRPO, then summed by its weight, then whitened over the batch.

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
        values = torch.tensor([group.trajectories[i].rewards[name] for i in index], dtype=torch.float64)
        summed[index] += reward_weights[name] * standardized(values, epsilon)
    return summed


def whitened(values: Tensor, counts: Tensor, epsilon: float) -> Tensor:
    """`(v - mean) / (std + epsilon)`, where each value counts as `counts` equal ones; unbiased.

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


def turn_relative(
    groups: Sequence[GroupSummary], config: TurnAdvantageConfig
) -> list[list[tuple[float, ...]]]:
    """One advantage for each turn of each trajectory.

    MT-GRPO, Zeng et al. 2025, arXiv 2505.11821: the last turn has the advantage of the outcome in
    its group; turn k before it has that of its reward among the k-th turns of the group that are not
    last ones, plus `outcome_weight` times that of the outcome. The outcome is the reward less the rewards
    of turns before the last one. With `discount` d a turn also earns the reward of j turns later, times d^j,
    as in returns (Ding et al. 2025, arXiv 2511.14846).
    """
    return [_of_group(group.trajectories, config) for group in groups]


def _of_group(
    trajectories: Sequence[TrajectorySummary], config: TurnAdvantageConfig
) -> list[tuple[float, ...]]:
    earned = [_earned_on_the_way(t, config.discount) for t in trajectories]
    outcomes = [t.reward - sum(t.turn_rewards[:-1]) for t in trajectories]
    of_outcome = _relative_turns(torch.tensor(outcomes, dtype=torch.float64), config).tolist()
    advantages = [
        [config.outcome_weight * outcome] * len(e) for outcome, e in zip(of_outcome, earned, strict=True)
    ]
    for turn in range(max(map(len, earned), default=0)):
        rows = [row for row, e in enumerate(earned) if len(e) > turn]
        values = torch.tensor([earned[row][turn] for row in rows], dtype=torch.float64)
        for row, value in zip(rows, _relative_turns(values, config).tolist(), strict=True):
            advantages[row][turn] += value
    return [
        (*on_the_way, outcome) if t.num_turns else ()
        for on_the_way, outcome, t in zip(advantages, of_outcome, trajectories, strict=True)
    ]


def _earned_on_the_way(trajectory: TrajectorySummary, discount: float) -> list[float]:
    """The discounted rewards of each turn but the last one, from that turn on: one number a turn."""
    earned: list[float] = []
    later = 0.0
    for reward in reversed(trajectory.turn_rewards[:-1]):
        later = reward + discount * later
        earned.insert(0, later)
    return earned


def _relative_turns(values: Tensor, config: TurnAdvantageConfig) -> Tensor:
    if config.normalize or all_equal(values):
        return standardized(values, config.epsilon)
    return values - values.mean()


Estimator = Callable[[Sequence[GroupSummary]], Sequence[Sequence[Advantage]]]

# From a config and the weights of the rewards.
_ESTIMATORS: Mapping[type[Config], Callable[[Any, Mapping[str, float]], Estimator]] = {
    GroupAdvantageConfig: lambda config, _: partial(group_relative, config=config),
    RemaxAdvantageConfig: lambda *_: remax,
    OptimalBaselineAdvantageConfig: lambda *_: optimal_baseline,
    GpgAdvantageConfig: lambda config, _: partial(gpg, config=config),
    PassAtKAdvantageConfig: lambda config, _: partial(pass_at_k, config=config),
    ReinforceAdvantageConfig: lambda config, _: partial(reinforce, config=config),
    GroupThenBatchAdvantageConfig: lambda config, _: partial(group_then_batch, config=config),
    GdpoAdvantageConfig: lambda config, weights: partial(gdpo, config=config, reward_weights=weights),
    TurnAdvantageConfig: lambda config, _: partial(turn_relative, config=config),
    CustomAdvantageConfig: lambda config, _: own_advantages(config),
}


def estimator(config: OfGroupsConfig, reward_weights: Mapping[str, float]) -> Estimator:
    """From groups to the advantages of their trajectories; `reward_weights` are of the rewards by name.

    Raises CustomFunctionError if a function of the user's cannot be found.
    """
    return _ESTIMATORS[type(config)](config, reward_weights)
