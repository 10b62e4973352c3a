"""Filters: groups and trajectories of a step that do not train.

A filtered trajectory remains in the batch as a placeholder, since every optimizer step has the same number of
trajectories. It counts neither in advantages nor in the denominators of the loss.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nemorl.config.algorithm.online import FiltersConfig, TruncatedRewardConfig
from nemorl.errors import RunError
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.rollout.schedule import Refill
from nemorl.trajectories import StopReason


@dataclass(frozen=True)
class FilteredBatch:
    """The groups of one step, of which some may not train, and what was filtered."""

    groups: list[GroupSummary]  # as many as a step has; those that train first, if any does not
    metrics: dict[str, float]


def refill(config: FiltersConfig, num_groups: int) -> Refill | None:
    """How a collector replaces groups that `config` drops, for steps of `num_groups`."""
    if config.refill is None:
        return None
    return Refill(lambda group: _dropped(group, config) is None, num_groups * config.refill.max_batches)


def filter_groups(groups: Sequence[GroupSummary], config: FiltersConfig, num_groups: int) -> FilteredBatch:
    """A step's batch of `num_groups` from the groups that were sampled for it, at least as many.

    Raises RunError if fewer are left than required and `refill.at_cap` is `stop`.
    """
    reasons = [_dropped(group, config) for group in groups]
    training = [group for group, reason in zip(groups, reasons, strict=True) if reason is None]
    dropped = Counter(reason for reason in reasons if reason is not None)
    if len(training) < num_groups and config.refill is not None and config.refill.at_cap == "stop":
        why = {"equal_rewards": "because their rewards are all equal", "mean_reward": "by their mean reward"}
        causes = " and ".join(f"{count} {why[reason]}" for reason, count in dropped.items())
        raise RunError(
            f"{len(training)} of {len(groups)} groups sampled for one step are left, {num_groups} are "
            f"required: {causes} were dropped. Use tasks of another difficulty, raise "
            "algorithm.num_generations_per_prompt or algorithm.filters.refill.max_batches, or train on fewer "
            "groups (set algorithm.filters.refill.at_cap to fewer)."
        )
    metrics = {}
    if config.drop_equal_rewards:
        metrics["filters/dropped_equal_rewards"] = dropped["equal_rewards"]
    if config.min_mean_reward is not None or config.max_mean_reward is not None:
        metrics["filters/dropped_mean_reward"] = dropped["mean_reward"]
    if config.keep_most_varied is not None:
        # StarPO-S, Wang et al. 2025, arXiv 2504.20073. Of equal deviations the earlier groups.
        by_deviation = sorted(training, key=lambda group: -_deviation(group, config))
        kept = by_deviation[: max(1, int(config.keep_most_varied * len(training)))]
        metrics["filters/least_varied"] = len(training) - len(kept)
        training = kept
    names = {group.group for group in training}
    left_out = [_without(group, lambda _: True) for group in groups if group.group not in names]
    if config.drop_truncated:
        ends = [t.stop for g in training for t in g.trajectories if t.trains]
        metrics["filters/truncated"] = ends.count(StopReason.LENGTH)
        training = [_without(g, lambda t: t.stop is StopReason.LENGTH) for g in training]
    if metrics:
        metrics |= {"filters/sampled": len(groups), "filters/kept": len(training)}
    numbers = {name: float(value) for name, value in metrics.items()}
    return FilteredBatch((training + left_out)[:num_groups], numbers)


def _dropped(group: GroupSummary, config: FiltersConfig) -> str | None:
    """Why a group is dropped; None if it is not. One in which every member failed always is."""
    values = _values(group, config)
    of_players = [_values(of_player, config) for of_player in group.by_player]
    if config.drop_equal_rewards and all(len(set(of_player)) < 2 for of_player in of_players):
        return "equal_rewards"
    low, high = config.min_mean_reward, config.max_mean_reward
    mean = sum(values) / len(values) if values else float("nan")  # which no bound holds
    inside = (low is None or mean >= low) and (high is None or mean <= high)
    return None if inside else "mean_reward"


def _values(group: GroupSummary, config: FiltersConfig) -> list[float]:
    finished = [t for t in group.trajectories if t.error is None]
    if config.reward is None:
        return [t.reward for t in finished]
    return [t.rewards[config.reward] for t in finished if config.reward in t.rewards]


def _deviation(group: GroupSummary, config: FiltersConfig) -> float:
    """Unbiased, in the arithmetic of the advantages; of several players the largest."""
    of_players = [_values(of_player, config) for of_player in group.by_player]
    deviations = [torch.tensor(v, dtype=torch.float64).std() for v in of_players if len(v) > 1]
    return max(map(float, deviations), default=0.0)


def _without(group: GroupSummary, leaves_out: Callable[[TrajectorySummary], bool]) -> GroupSummary:
    members = (replace(t, trains=t.trains and not leaves_out(t)) for t in group.trajectories)
    return replace(group, trajectories=tuple(members))


def with_truncated_rewards(
    groups: Sequence[GroupSummary], config: TruncatedRewardConfig | None
) -> list[GroupSummary]:
    """The groups with the rewards on which trajectories train that a token limit ended."""
    if config is None:
        return list(groups)

    def member(one: TrajectorySummary) -> TrajectorySummary:
        if one.stop is not StopReason.LENGTH:
            return one
        # A value replaces the sum; it is given at the end, and not to single turns.
        scale = config.scale or 0.0
        branches = tuple(
            replace(branch, turn_rewards=tuple(scale * reward for reward in branch.turn_rewards))
            for branch in one.branches
        )
        turns = tuple(scale * reward for reward in one.turn_rewards)
        reward = scale * one.reward if config.value is None else config.value
        return replace(one, reward=reward, turn_rewards=turns, branches=branches)

    return [
        replace(
            group,
            trajectories=tuple(map(member, group.trajectories)),
            greedy=None if group.greedy is None else member(group.greedy),
        )
        for group in groups
    ]
