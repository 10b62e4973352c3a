"""Validation: sample the validation tasks, and their metrics with 95% intervals (docs/evaluation.md)."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

from nemorl.algorithms.metrics import means_by_name, player_metrics
from nemorl.config.algorithm import ValidationConfig
from nemorl.config.experiment import Experiment
from nemorl.data.datasets import load_tasks
from nemorl.rollout.collector import OnFinished, ignore, sample_validation
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.session.session import Session

QUANTILE = 1.959963984540054  # of the normal distribution at 97.5 %


@dataclass(frozen=True)
class Interval:  # bounds of the mean over all tasks of this kind, with 95 % confidence
    low: float
    high: float


def validation_metrics(
    groups: Sequence[GroupSummary], config: ValidationConfig, prefix: str = "validation"
) -> dict[str, float]:
    """Mean reward, accuracy (the share of samples that pass: avg@n of n samples), pass@k and cons@k.

    Reward, accuracy, pass@k and cons@k come with the bounds of their intervals, `_low` and `_high`.
    """
    members = [t for group in groups for t in group.trajectories]
    passed = [[t.reward >= config.pass_reward for t in group.trajectories] for group in groups]
    shares: dict[str, list[float]] = {"accuracy": [fmean(of_task) for of_task in passed]}
    for k in config.pass_at_k:
        shares[f"pass@{k}"] = [pass_at_k(len(of_task), sum(of_task), k) for of_task in passed]
    for k in config.cons_at_k:
        tasks = zip(groups, passed, strict=True)
        shares[f"cons@{k}"] = [cons_at_k(group.trajectories, of_task, k) for group, of_task in tasks]
    rewards = [fmean(t.reward for t in group.trajectories) for group in groups]
    metrics = {"reward": fmean(rewards), **_bounds("reward", normal_interval(rewards))}
    metrics |= means_by_name(members) | player_metrics(members)
    for name, of_tasks in shares.items():
        metrics |= {name: fmean(of_tasks), **_bounds(name, wilson_interval(of_tasks))}
    metrics["length"] = fmean(t.num_sampled for t in members)
    metrics["errors"] = float(sum(t.error is not None for t in members))
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased chance that one of k samples passes (Chen et al. 2021, arXiv 2107.03374)."""
    if k > samples:
        raise ValueError(f"pass@{k} requires at least {k} samples of each task, got {samples}")
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def cons_at_k(samples: Sequence[TrajectorySummary], passed: Sequence[bool], k: int) -> float:
    """1 if the answer that most of the first k samples give is right (Wang et al. 2022, arXiv 2203.11171).

    What has no answer does not vote. Of answers with equally many votes, the share of right ones counts; an
    answer is right where the first sample that gives it passes. 0 without a vote.
    """
    if k > len(samples):
        raise ValueError(f"cons@{k} requires at least {k} samples of each task, got {len(samples)}")
    right: dict[str, bool] = {}
    votes: Counter[str] = Counter()
    for sample, passes in zip(samples[:k], passed[:k], strict=True):
        if sample.answer is not None:
            votes[sample.answer] += 1
            right.setdefault(sample.answer, passes)
    most = max(votes.values(), default=0)
    return fmean(right[answer] for answer, count in votes.items() if count == most) if votes else 0.0


def wilson_interval(shares: Sequence[float]) -> Interval:
    """Of the mean of shares, one for each task: Wilson's (1927), with tasks as the units.

    Samples of one task are correlated, so n is not their number but `p (1 - p) / variance of the mean`: the
    number of tasks where each has one sample, and more where the samples of a task differ.
    """
    p, tasks = fmean(shares), len(shares)
    variance = pvariance(shares) / tasks
    n = p * (1 - p) / variance if variance > 0 else float(tasks)
    around = QUANTILE**2 / n
    middle = (p + around / 2) / (1 + around)
    half = QUANTILE / (1 + around) * math.sqrt(p * (1 - p) / n + around / (4 * n))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def normal_interval(values: Sequence[float]) -> Interval | None:
    """Of the mean of values without bounds: `mean ± 1.96 s / sqrt(tasks)`; None of a single task."""
    if len(values) < 2:
        return None
    mean, tasks = fmean(values), len(values)
    half = QUANTILE * math.sqrt(pvariance(values) / (tasks - 1))
    return Interval(mean - half, mean + half)


def with_intervals(metrics: Mapping[str, float]) -> Iterable[tuple[str, float, Interval | None]]:
    """Metrics without the bounds, each with its interval if it has one."""
    for name, value in metrics.items():
        measured = name.removesuffix("_low").removesuffix("_high")
        if measured == name or measured not in metrics:
            low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
            yield name, value, Interval(low, high) if low is not None and high is not None else None


def _bounds(name: str, interval: Interval | None) -> dict[str, float]:
    return {} if interval is None else {f"{name}_low": interval.low, f"{name}_high": interval.high}


def validation_sets(experiment: Experiment) -> dict[str, int]:
    """Number of tasks of each of `data.validation_sets`; the key of `data.validation` is empty."""
    config, data = experiment.algorithm.validation, experiment.data
    datasets = {} if data.validation is None else {"": data.validation}
    sizes = {name: len(load_tasks(each, data)) for name, each in (datasets | data.validation_sets).items()}
    return {name: min(config.num_prompts or size, size) for name, size in sizes.items()}


async def validate(
    session: Session, experiment: Experiment, sets: Mapping[str, int], on_finished: OnFinished = ignore
) -> tuple[dict[str, float], dict[str, list[GroupSummary]]]:
    """Sample the sets in sequence, with the weights that generation holds; metrics, and the groups by set."""
    config = experiment.algorithm.validation
    metrics: dict[str, float] = {}
    sampled: dict[str, list[GroupSummary]] = {}
    for name, num_tasks in sets.items():
        samples, seconds = config.num_generations_per_prompt, experiment.cluster.deadlines.generation
        texts = experiment.logger.samples_per_step
        groups = await sample_validation(
            session.rollout, num_tasks, samples, seconds, texts, on_finished, name
        )
        metrics |= validation_metrics(groups, config, f"validation/{name}" if name else "validation")
        sampled[name] = groups
    return metrics, sampled
