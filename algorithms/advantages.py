"""Advantages of trajectories, or of their turns, from the rewards of a batch.

Each estimator takes the groups of a batch, without failed trajectories and dropped groups, and returns a list
for each group, with a number for each trajectory or a tuple with one for each of its turns.

Estimators that compare the members of a group give exactly 0 to a group with a single member or with equal
rewards (in verl a single member has its raw reward).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemorl.config.algorithm import advantages as configs
from nemorl.config.base import Config
from nemorl.data.packed import Advantage
from nemorl.rollout.groups import GroupSummary

from .custom import own_advantages


def rewards(group: GroupSummary) -> Tensor:  # [members] float64
    return torch.tensor([t.reward for t in group.trajectories], dtype=torch.float64)


def sampled_tokens(group: GroupSummary) -> Tensor:  # [members] float64
    return torch.tensor([t.num_sampled for t in group.trajectories], dtype=torch.float64)


def all_equal(values: Tensor) -> bool:
    """True if there is nothing to compare, also of one value or none."""
    return len(values) < 2 or bool((values == values[0]).all())


def relative(values: Tensor, epsilon: float | None, *, leave_one_out: bool = False) -> Tensor:
    """Values [..., n] less their mean, over their unbiased standard deviation plus epsilon.

    Not divided where epsilon is None. Exactly 0 where all n are equal. With `leave_one_out` the mean is that
    of the others.
    """
    if (count := values.shape[-1]) < 2:
        return torch.zeros_like(values)
    centered = values - values.mean(-1, keepdim=True)
    if leave_one_out:
        centered = centered * count / (count - 1)
    if epsilon is not None:
        centered = centered / (values.std(-1, keepdim=True) + epsilon)
    differ = (values != values[..., :1]).any(-1, keepdim=True)
    return torch.where(differ, centered, 0.0)


def relative_to_others(values: Tensor, epsilon: float) -> Tensor:
    """Values [..., n] less the mean of the others, over their unbiased standard deviation plus epsilon.

    NeMo-RL's estimator with a leave-one-out baseline. Not divided where the others are equal, or only one.
    """
    count = values.shape[-1]
    if count < 2:
        return torch.zeros_like(values)
    alone = torch.eye(count, dtype=torch.bool)
    rows = values.unsqueeze(-2).expand(*values.shape, count)
    others = rows[~alone.expand_as(rows)].reshape(*values.shape, count - 1)
    centered = values - others.mean(-1)
    if count == 2:
        return centered
    deviation = others.std(-1)
    differ = (others != others[..., :1]).any(-1)
    return torch.where(differ, centered / (deviation + epsilon), centered)


def group_relative(groups: Sequence[GroupSummary], config: configs.GroupAdvantageConfig) -> list[list[float]]:
    """`A = (r - mean) / (std + epsilon)` with the mean and the unbiased standard deviation of the group.

    Shao et al. 2024, arXiv 2402.03300; without `normalize` it is Dr. GRPO's (Liu et al. 2025,
    arXiv 2503.20783). With `leave_one_out` the mean is that of the others (RLOO, Ahmadian et al. 2024, arXiv
    2402.14740), and `deviation: others` scales by theirs, too. Epsilon is 1e-6 as in verl; TRL adds 1e-4,
    OpenRLHF 1e-9.
    """
    advantages: list[list[float]] = [[] for _ in groups]
    by_size: defaultdict[int, list[int]] = defaultdict(list)  # as tensors of many groups, which cost far less
    for place, group in enumerate(groups):
        by_size[len(group.trajectories)].append(place)
    for places in by_size.values():
        of_groups = [[t.reward for t in groups[place].trajectories] for place in places]
        of_size = compared(torch.tensor(of_groups, dtype=torch.float64), config).tolist()
        for place, of_group in zip(places, of_size, strict=True):
            advantages[place] = of_group
    return advantages


def compared(values: Tensor, config: configs.GroupRelativeBase) -> Tensor:
    """Values [..., n] of groups of n, compared as the config says."""
    if config.deviation == "others":
        return relative_to_others(values, config.epsilon)
    epsilon = config.epsilon if config.normalize else None
    return relative(values, epsilon, leave_one_out=config.leave_one_out)


def remax(groups: Sequence[GroupSummary]) -> list[list[float]]:
    """`A = r - r_greedy`: the baseline is the reward of a greedy sample of the same task.

    Li et al. 2023, arXiv 2310.10505. Where the greedy sample failed the group has advantage 0.
    """
    advantages = []
    for group in groups:
        greedy = None if group.greedy is None or group.greedy.error is not None else group.greedy.reward
        advantages.append([0.0 if greedy is None else t.reward - greedy for t in group.trajectories])
    return advantages


def optimal_baseline(groups: Sequence[GroupSummary]) -> list[list[float]]:
    """`A = r - b` with `b = sum(l r) / sum(l)`, where l is the number of sampled tokens.

    OPO, Hao et al. 2025, arXiv 2505.23585: the equal baseline of a group that has the least variance when the
    norm of a trajectory's gradient grows with its length.
    """
    advantages = []
    for group in groups:
        r, lengths = rewards(group), sampled_tokens(group)
        teaches = not all_equal(r) and bool(lengths.sum())
        baseline = (lengths * r).sum() / lengths.sum() if teaches else r
        advantages.append((r - baseline).tolist())
    return advantages


def gpg(groups: Sequence[GroupSummary], config: configs.GpgAdvantageConfig) -> list[list[float]]:
    """`A = alpha (r - mean)` with `alpha = B / (B - M)`, where M of the B groups have equal rewards.

    GPG, Chu et al. 2025, arXiv 2504.02546: groups without a gradient do not thin out that of the others. With
    `normalize` divided by the standard deviation of the group.
    """
    epsilon = config.epsilon if config.normalize else None
    alpha = len(groups) / max(sum(not all_equal(rewards(group)) for group in groups), 1)
    return [(alpha * relative(rewards(group), epsilon)).tolist() for group in groups]


def pass_at_k(groups: Sequence[GroupSummary], config: configs.PassAtKAdvantageConfig) -> list[list[float]]:
    """The expectation of GRPO's advantage when each k of the group's n trajectories are rewarded as one.

    Chen et al. 2025, arXiv 2508.10751. With n- trajectories that do not pass, `R = 1 - C(n-, k) / C(n, k)` is
    the mean reward of the sets and `s = sqrt(R (1 - R))` their deviation; a trajectory that passes has `(1 -
    R) / s`, another `(1 - R - C(n- - 1, k - 1) / C(n - 1, k - 1)) / s`. Where every set has the same reward,
    and where fewer than k trajectories are left, it is 0.
    """
    advantages = []
    for group in groups:
        passed = [t.reward >= config.pass_reward for t in group.trajectories]
        n, failed, k = len(passed), passed.count(False), config.k
        if n < k or math.comb(failed, k) in (0, math.comb(n, k)):
            advantages.append([0.0] * n)
            continue
        mean = 1 - math.comb(failed, k) / math.comb(n, k)
        deviation = math.sqrt(mean * (1 - mean))
        right = (1 - mean) / deviation
        wrong = (1 - mean - math.comb(failed - 1, k - 1) / math.comb(n - 1, k - 1)) / deviation
        advantages.append([right if ok else wrong for ok in passed])
    return advantages


def reinforce(groups: Sequence[GroupSummary], config: configs.ReinforceAdvantageConfig) -> list[list[float]]:
    """The reward; less the mean of the batch; or that over the batch's standard deviation as well.

    Williams 1992, with a constant baseline.
    """
    r, counts = _flat(list(map(rewards, groups))), _counts(groups, config.over)
    match config.normalization:
        case "mean":
            r = r - _mean(r, counts)
        case "whiten":
            r = whitened(r, counts, config.epsilon, config.variance)
    return _grouped(r, groups)


def group_then_batch(
    groups: Sequence[GroupSummary], config: configs.GroupThenBatchAdvantageConfig
) -> list[list[float]]:
    """`A = (r - mean of the group)`, then `(A - mean) / (std + epsilon)` over the batch.

    REINFORCE++-baseline, Hu et al. 2025, arXiv 2501.03262: the scale is the same for all groups.
    """
    centered = _flat([r - r.mean() for r in map(rewards, groups) if len(r)])
    values = whitened(centered, _counts(groups, config.over), config.epsilon, config.variance)
    return _grouped(values, groups)


def gdpo(
    groups: Sequence[GroupSummary], config: configs.GdpoAdvantageConfig, reward_weights: Mapping[str, float]
) -> list[list[float]]:
    """Each reward separately as in GRPO, then summed by its weight, then whitened over the batch.

    GDPO, Liu et al. 2026, arXiv 2601.05242: differences in one reward do not vanish in the sum of all. A
    reward that does not apply to a trajectory adds 0 to it and does not enter the group's mean of it. verl
    whitens over tokens, the paper and NeMo-RL over trajectories.
    """
    sums = []
    for group in groups:
        summed = torch.zeros(len(group.trajectories), dtype=torch.float64)
        for name in sorted({name for t in group.trajectories for name in t.rewards}):
            index = [place for place, t in enumerate(group.trajectories) if name in t.rewards]
            values = torch.tensor([group.trajectories[i].rewards[name] for i in index], dtype=torch.float64)
            summed[index] += reward_weights[name] * compared(values, config)
        sums.append(summed)
    advantages = _flat(sums)
    if config.whiten_batch:
        advantages = whitened(advantages, _counts(groups, config.over), config.batch_epsilon)
    return _grouped(advantages, groups)


def whitened(
    values: Tensor, counts: Tensor, epsilon: float, variance: configs.Variance = "unbiased"
) -> Tensor:
    """`(v - mean) / (std + epsilon)`, where each value counts as `counts` equal ones.

    All 0 where the values are equal. verl's `masked_whiten` is the same but for epsilon, which it adds to
    the variance.
    """
    if all_equal(values):
        return torch.zeros_like(values)
    centered = values - _mean(values, counts)
    divisor = (counts.sum() - int(variance == "unbiased")).clamp(min=1)
    squares = (counts * centered.square()).sum()
    return centered / ((squares / divisor).sqrt() + epsilon)


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    return (counts * values).sum() / counts.sum().clamp(min=1)


def _counts(groups: Sequence[GroupSummary], over: configs.Over) -> Tensor:
    """How often each trajectory counts: [S] float64."""
    tokens = _flat(list(map(sampled_tokens, groups)))
    return tokens if over == "tokens" else torch.ones_like(tokens)


def _flat(of_groups: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *of_groups])


def _grouped(values: Tensor, groups: Sequence[GroupSummary]) -> list[list[float]]:
    return [part.tolist() for part in values.split([len(group.trajectories) for group in groups])]


def turn_relative(
    groups: Sequence[GroupSummary], config: configs.TurnAdvantageConfig
) -> list[list[tuple[float, ...]]]:
    """One advantage for each turn of each trajectory.

    MT-GRPO, Zeng et al. 2025, arXiv 2505.11821: the last turn has the advantage of the outcome in its group;
    turn k before it has that of its reward among the k-th turns of the group that are not last ones, plus
    `outcome_weight` times that of the outcome, the reward less the rewards of turns before the last one. With
    `discount` d a turn also earns the reward of j turns later times d^j (Ding et al. 2025, arXiv 2511.14846).
    """

    def compared(values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        return relative(tensor, config.epsilon if config.normalize else None).tolist()

    advantages = []
    for group in groups:
        # Of each trajectory the discounted rewards from each turn but the last one on.
        earned: list[list[float]] = []
        for t in group.trajectories:
            later, returns = 0.0, []
            for reward in reversed(t.turn_rewards[:-1]):
                later = reward + config.discount * later
                returns.append(later)
            earned.append(returns[::-1])
        outcomes = compared([t.reward - sum(t.turn_rewards[:-1]) for t in group.trajectories])
        pairs = zip(outcomes, earned, strict=True)
        of_turns = [[config.outcome_weight * outcome] * len(e) for outcome, e in pairs]
        for turn in range(max(map(len, earned), default=0)):
            rows = [row for row, e in enumerate(earned) if len(e) > turn]
            for row, value in zip(rows, compared([earned[row][turn] for row in rows]), strict=True):
                of_turns[row][turn] += value
        members = zip(of_turns, outcomes, group.trajectories, strict=True)
        advantages.append([(*before, last) if t.num_turns else () for before, last, t in members])
    return advantages


Estimator = Callable[[Sequence[GroupSummary]], Sequence[Sequence[Advantage]]]

# From a config and the weights of the rewards.
_ESTIMATORS: Mapping[type[Config], Callable[[Any, Mapping[str, float]], Estimator]] = {
    configs.GroupAdvantageConfig: lambda config, _: partial(group_relative, config=config),
    configs.RemaxAdvantageConfig: lambda *_: remax,
    configs.OptimalBaselineAdvantageConfig: lambda *_: optimal_baseline,
    configs.GpgAdvantageConfig: lambda config, _: partial(gpg, config=config),
    configs.PassAtKAdvantageConfig: lambda config, _: partial(pass_at_k, config=config),
    configs.ReinforceAdvantageConfig: lambda config, _: partial(reinforce, config=config),
    configs.GroupThenBatchAdvantageConfig: lambda config, _: partial(group_then_batch, config=config),
    configs.GdpoAdvantageConfig: lambda config, weights: partial(gdpo, config=config, reward_weights=weights),
    configs.TurnAdvantageConfig: lambda config, _: partial(turn_relative, config=config),
    configs.CustomAdvantageConfig: lambda config, _: own_advantages(config),
}


def estimator(config: configs.OfGroupsConfig, reward_weights: Mapping[str, float]) -> Estimator:
    """From groups to the advantages of their trajectories; `reward_weights` are of the rewards by name.

    Raises CustomFunctionError if a function of the user's cannot be found.
    """
    return _ESTIMATORS[type(config)](config, reward_weights)
