"""Figures of a batch of groups: what metrics.jsonl says about sampling."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.trajectories import StopReason

def rollout_metrics(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Rewards, lengths, stop reasons and errors of a step's trajectories, of which one at least is sound.

    Failed trajectories count, with the tokens they sampled, among lengths, stops and errors, not among
    rewards. `reward/std` is over all sound trajectories; `group/zero_variance` is the share of groups whose
    rewards are all equal, which teach nothing.
    """
    members = [t for group in groups for t in group.trajectories]
    sound = [[t for t in group.trajectories if t.error is None] for group in groups]
    rewards = [t.reward for group in sound for t in group]
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        **means_by_name([t for group in sound for t in group], "reward"),
        **_of_rewards(groups),
        "group/zero_variance": fmean(len({t.reward for t in group}) < 2 for group in sound),
        "length/mean": fmean(t.num_sampled for t in members),
        "turns/mean": fmean(t.num_turns for t in members),
        **_stops(members),
        "errors": float(sum(t.error is not None for t in members)),
        "tokens/generated": float(sum(t.num_sampled for t in members)),
        "version/lag": fmean(t.max_version - t.min_version for t in members),
        **_greedy(groups),
    }


def environment_share(groups: Sequence[GroupSummary]) -> float:
    """Fraction of the trajectories' time that environments and rewards took."""
    members = [t for group in groups for t in group.trajectories]
    environment = sum(t.seconds_environment for t in members)
    whole = environment + sum(t.seconds_generation for t in members)
    return environment / whole if whole > 0 else 0.0


def _greedy(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Mean reward of the greedy samples beside the groups, where there are any."""
    paid = [g.greedy.reward for g in groups if g.greedy is not None and g.greedy.error is None]
    return {"reward/of_greedy": fmean(paid)} if paid else {}


def means_by_name(members: Sequence[TrajectorySummary], prefix: str) -> dict[str, float]:
    """Mean of each reward over the trajectories to which it applies."""
    names = sorted({name for t in members for name in t.rewards})
    return {
        f"{prefix}/{name}": fmean(t.rewards[name] for t in members if name in t.rewards) for name in names
    }


def _of_rewards(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Of each reward: its spread, the share of sound trajectories to which it does not apply and, of those
    that are computed, the trajectories lost to it, retries, and the mean seconds of a group's scoring: that
    its calls took, and that they waited for a place.
    """
    sound = [t for group in groups for t in group.trajectories if t.error is None]
    computed = sorted({name for group in groups for name in group.scoring})
    metrics = {}
    for name in sorted({name for t in sound for name in t.rewards} | set(computed)):
        values = [t.rewards[name] for t in sound if name in t.rewards]
        metrics[f"reward_absent/{name}"] = 1 - len(values) / len(sound)
        if values:
            metrics[f"reward_std/{name}"] = pstdev(values)
    for name in computed:
        scored = [group.scoring[name] for group in groups if name in group.scoring]
        metrics[f"reward_errors/{name}"] = float(sum(s.errors for s in scored))
        metrics[f"reward_seconds/{name}"] = fmean(s.seconds for s in scored)
        metrics[f"reward_waiting/{name}"] = fmean(s.waited for s in scored)
        if any(s.retries is not None for s in scored):
            metrics[f"reward_retries/{name}"] = float(sum(s.retries or 0 for s in scored))
    return metrics


def _stops(members: Sequence[TrajectorySummary]) -> dict[str, float]:
    counts = Counter(t.stop for t in members)
    return {f"stop/{reason}": counts[reason] / len(members) for reason in StopReason if counts[reason]}
