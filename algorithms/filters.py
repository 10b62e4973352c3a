"""Filters: groups and trajectories of a step that do not train.

A filtered trajectory remains in the batch as a placeholder, since every optimizer step has the same number of
trajectories. It counts neither in advantages nor in the denominators of the loss.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from nemorl.config.algorithm.online import FiltersConfig
from nemorl.errors import RunError
from nemorl.rollout.collector import GroupSummary, Refill
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
    if not config.active:
        return FilteredBatch(list(groups), {})
    reasons = [_dropped(group, config) for group in groups]
    kept = [group for group, reason in zip(groups, reasons, strict=True) if reason is None]
    dropped = Counter(reason for reason in reasons if reason is not None)
    if len(kept) < num_groups and config.refill is not None and config.refill.at_cap == "stop":
        raise RunError(_too_few(len(kept), num_groups, dropped, len(groups)))
    varied = _most_varied(kept, config)
    training = [_without_truncated(group) if config.drop_truncated else group for group in varied]
    names = {group.group for group in varied}
    left_out = [_left_out(group) for group in groups if group.group not in names]
    metrics = {
        "filters/sampled": float(len(groups)),
        "filters/kept": float(len(training)),
        **{f"filters/dropped_{reason}": float(dropped[reason]) for reason in _reasons(config)},
        **({"filters/least_varied": float(len(kept) - len(varied))} if config.keep_most_varied else {}),
        **({"filters/truncated": float(_truncated(varied))} if config.drop_truncated else {}),
    }
    return FilteredBatch((training + left_out)[:num_groups], metrics)


def _reasons(config: FiltersConfig) -> Iterator[str]:
    """Why groups may be dropped at all."""
    if config.drop_equal_rewards:
        yield "equal_rewards"
    if config.min_mean_reward is not None or config.max_mean_reward is not None:
        yield "mean_reward"


def _dropped(group: GroupSummary, config: FiltersConfig) -> str | None:
    """Why a group is dropped; None if it is not. One in which every member failed always is."""
    values = _values(group, config)
    if config.drop_equal_rewards and len(set(values)) < 2:
        return "equal_rewards"
    low, high = config.min_mean_reward, config.max_mean_reward
    if low is None and high is None:
        return None
    mean = sum(values) / len(values) if values else float("nan")  # which no bound holds
    inside = (low is None or mean >= low) and (high is None or mean <= high)
    return None if inside else "mean_reward"


def _values(group: GroupSummary, config: FiltersConfig) -> list[float]:
    """The rewards that count, of the members to which they apply."""
    finished = [t for t in group.trajectories if t.error is None]
    if config.reward is None:
        return [t.reward for t in finished]
    return [t.rewards[config.reward] for t in finished if config.reward in t.rewards]


def _most_varied(groups: list[GroupSummary], config: FiltersConfig) -> list[GroupSummary]:
    """The share of the groups with the largest unbiased deviation, one at least; all without such a filter.

    StarPO-S, Wang et al. 2025, arXiv 2504.20073. Of equals the earlier ones.
    """
    if config.keep_most_varied is None or not groups:
        return groups
    by_deviation = sorted(groups, key=lambda group: -_deviation(_values(group, config)))
    return by_deviation[: max(1, int(config.keep_most_varied * len(groups)))]


def _deviation(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else 0.0


def _without_truncated(group: GroupSummary) -> GroupSummary:
    members = (replace(t, trains=t.trains and t.stop is not StopReason.LENGTH) for t in group.trajectories)
    return replace(group, trajectories=tuple(members))


def _left_out(group: GroupSummary) -> GroupSummary:
    return replace(group, trajectories=tuple(replace(t, trains=False) for t in group.trajectories))


def _truncated(groups: Sequence[GroupSummary]) -> int:
    return sum(t.trains and t.stop is StopReason.LENGTH for group in groups for t in group.trajectories)


def _too_few(kept: int, required: int, dropped: Counter[str], sampled: int) -> str:
    why = {"equal_rewards": "because their rewards are all equal", "mean_reward": "by their mean reward"}
    causes = " and ".join(f"{count} {why[reason]}" for reason, count in dropped.items())
    return (
        f"{kept} of {sampled} groups sampled for one step are left, {required} are required: {causes} were "
        "dropped. Use tasks of another difficulty, raise algorithm.num_generations_per_prompt or "
        "algorithm.filters.refill.max_batches, or train on fewer groups (set algorithm.filters.refill.at_cap "
        "to fewer)."
    )
