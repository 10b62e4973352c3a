"""Metrics of a step, its samples, and the gate on the gap between the logprobs of engine and trainer.

The first batch of a process and every batch of the config's period are compared before the update. In between
the gap comes with the update itself, except in best-of-n, whose losses do not compute it.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from statistics import fmean
from typing import get_args

import numpy as np

from nemorl.config.algorithm import OnlineBase
from nemorl.config.generation import GenerationBase
from nemorl.data.losses import TrainStats
from nemorl.data.trained import Trained
from nemorl.errors import RunError
from nemorl.observe.index import TrajectoryRow
from nemorl.observe.metrics import Phase, Sample
from nemorl.rollout.groups import Dropped, DropReason, GroupSummary, TrajectorySummary
from nemorl.rollout.stored import SequenceKey
from nemorl.rollout.versions import UNBROKEN, Lineage
from nemorl.trajectories import StopReason


def rollout_metrics(
    groups: Sequence[GroupSummary], version: int, lineage: Lineage = UNBROKEN
) -> dict[str, float]:
    """Rewards, lengths, stop reasons and errors of a step in which at least one trajectory succeeded.

    Failed trajectories count, with the tokens they sampled, among lengths, stops and errors, not among
    rewards. `trajectory_seconds/*` are means. `group/zero_variance` is the share of groups whose rewards are
    all equal, which have no gradient.
    """
    members = [t for group in groups for t in group.trajectories]
    sound = [t for t in members if t.error is None]
    columns = attrgetter(
        *("stop", "num_sampled", "num_turns", "environment_failed", "truncated", "num_retries"),
        *("seconds_generation", "seconds_environment"),
    )
    stops, sampled, turns, failed, truncated, retries, generation, environment = zip(
        *map(columns, members), strict=True
    )
    rewards = [t.reward for t in sound]
    of_players = (g for group in groups for g in group.by_player)
    equal = [len({t.reward for t in g.trajectories if t.error is None}) < 2 for g in of_players]
    greedy = [g.greedy.reward for g in groups if g.greedy is not None and g.greedy.error is None]
    by_name = _rewards_by_name(sound)
    return {
        "reward/mean": fmean(rewards),
        "reward/std": float(np.std(rewards)),
        **{f"reward/{name}": fmean(values) for name, values in by_name.items()},
        **player_metrics(sound),
        **_reward_metrics(groups, by_name, len(sound)),
        "group/zero_variance": fmean(equal),
        "length/mean": fmean(sampled),
        "turns/mean": fmean(turns),
        "trajectory_seconds/generation": fmean(generation),
        "trajectory_seconds/environment": fmean(environment),
        **_flag_metrics(groups),
        **{f"stop/{reason}": count / len(members) for reason, count in Counter(stops).items()},
        "errors": float(len(members) - len(sound)),
        "environment/errors": float(sum(failed)),
        "environment/truncated": float(sum(truncated)),
        "environment/retries": float(sum(retries)),
        "tokens/generated": float(sum(sampled)),
        **_version_metrics(members, version, lineage),
        **_environment_metrics(groups),
        **({"reward/of_greedy": fmean(greedy)} if greedy else {}),
    }


def _flag_metrics(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Of each flag the share of the turns that have it, of the groups whose turns may."""
    metrics = {}
    for name in sorted({name for group in groups for name in group.flags}):
        members = [t for group in groups if name in group.flags for t in group.trajectories]
        flagged = sum(name in flags for t in members for flags in t.turn_flags)
        metrics[f"flagged_turns/{name}"] = flagged / max(1, sum(t.num_turns for t in members))
    return metrics


def _environment_metrics(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Of each environment, where groups name theirs: share of the samples, errors, turns and mean reward."""
    by_name: dict[str, list[TrajectorySummary]] = {}
    for group in groups:
        if group.environment:
            by_name.setdefault(group.environment, []).extend(group.trajectories)
    total, metrics = sum(map(len, by_name.values())), {}
    for name, members in by_name.items():
        metrics[f"environment/{name}/share"] = len(members) / total
        metrics[f"environment/{name}/errors"] = float(sum(t.environment_failed for t in members))
        metrics[f"environment/{name}/turns"] = fmean(t.num_turns for t in members)
        if rewards := [t.reward for t in members if t.error is None]:
            metrics[f"environment/{name}/reward"] = fmean(rewards)
    return metrics


def _version_metrics(
    members: Sequence[TrajectorySummary], version: int, lineage: Lineage
) -> dict[str, float]:
    """How old samples are: `version` is the trained one, a trajectory's age that of its oldest token."""
    spans = Counter((t.min_version, t.max_version) for t in members if t.min_version >= 0)  # few differ
    ages = {span: max(lineage.age(one, version) for one in range(span[0], span[1] + 1)) for span in spans}
    count = max(1, spans.total())
    return {
        "version/lag": sum(ages[span] * spans[span] for span in spans) / count,
        "version/lag_max": float(max(ages.values(), default=0)),
        "version/spread": sum((newest - oldest) * n for (oldest, newest), n in spans.items()) / count,
    }


def dropped_metrics(
    dropped: Sequence[Dropped], num_given_up: int, groups: Sequence[GroupSummary]
) -> dict[str, float]:
    """Attempts at groups since the last step that nothing was trained on, next to the `groups` of this step.

    Without a bias by length `dropped/length_ratio` is 1 and each `dropped/share_q*`, the share of dropped
    trajectories with lengths of that quarter of the finished ones, 0.25; without one by reward
    `dropped/reward_gap` is 0. Trajectories that a deadline ended in these groups count as dropped.
    """
    members = [t for group in groups for t in group.trajectories]
    late = [t.num_sampled for t in members if t.stop is StopReason.DEADLINE]
    reasons = Counter(one.reason for one in dropped)
    rewards = [reward for one in dropped for reward in one.rewards]
    lengths = [*(length for one in dropped for length in one.lengths), *late]
    finished = [t for t in members if t.error is None]
    metrics = {f"dropped/{reason}": float(reasons[reason]) for reason in get_args(DropReason)}
    metrics |= {
        "dropped/given_up": float(num_given_up),
        "dropped/late": float(len(late)),
        "dropped/tokens": float(sum(lengths)),
    }
    if rewards:
        metrics["dropped/reward"] = fmean(rewards)
        metrics["dropped/reward_gap"] = fmean(rewards) - fmean(t.reward for t in finished)
    if lengths:
        kept = [t.num_sampled for t in finished]
        metrics["dropped/length"] = fmean(lengths)
        metrics["dropped/length_ratio"] = fmean(lengths) / max(1.0, fmean(kept))
        shares = _shares_of_quarters(lengths, kept)
        metrics |= {f"dropped/share_q{quarter}": share for quarter, share in enumerate(shares, 1)}
    return metrics


def _shares_of_quarters(lengths: Sequence[int], others: Sequence[int]) -> list[float]:
    """Shares of `lengths` in the quarters of `others`; a length that several quarters have counts in each."""
    ordered, shares = sorted(others), [0.0] * 4
    for length in lengths:
        low, high = (4 * find(ordered, length) / len(ordered) for find in (bisect_left, bisect_right))
        for quarter in range(4):
            inside = max(0.0, min(high, quarter + 1) - max(low, quarter))
            # A length that none of the others has is a point between them.
            share = inside / (high - low) if high > low else float(quarter == min(3, int(low)))
            shares[quarter] += share / len(lengths)
    return shares


def environment_share(groups: Sequence[GroupSummary]) -> float:
    """Fraction of the trajectories' time that environments and rewards took."""
    members = [t for group in groups for t in group.trajectories]
    environment = sum(t.seconds_environment for t in members)
    whole = environment + sum(t.seconds_generation for t in members)
    return environment / whole if whole > 0 else 0.0


def _rewards_by_name(members: Sequence[TrajectorySummary]) -> dict[str, list[float]]:
    rewards = [t.rewards for t in members]
    return {name: [r[name] for r in rewards if name in r] for name in sorted(set().union(*rewards))}


def means_by_name(members: Sequence[TrajectorySummary]) -> dict[str, float]:
    return {f"reward/{name}": fmean(values) for name, values in _rewards_by_name(members).items()}


def player_metrics(members: Sequence[TrajectorySummary]) -> dict[str, float]:
    """Mean reward of each player, by name."""
    names = sorted({t.player for t in members} - {""})
    return {f"players/{name}/reward": fmean(t.reward for t in members if t.player == name) for name in names}


def _reward_metrics(
    groups: Sequence[GroupSummary], by_name: Mapping[str, Sequence[float]], num_sound: int
) -> dict[str, float]:
    computed = sorted({name for group in groups for name in group.scoring})
    metrics = {}
    for name in sorted(by_name.keys() | computed):
        values = by_name.get(name, ())
        metrics[f"reward_absent/{name}"] = 1 - len(values) / num_sound
        if values:
            metrics[f"reward_std/{name}"] = float(np.std(values))
    for name in computed:
        scored = [group.scoring[name] for group in groups if name in group.scoring]
        metrics[f"reward_errors/{name}"] = float(sum(s.errors for s in scored))
        metrics[f"reward_seconds/{name}"] = fmean(s.seconds for s in scored)
        metrics[f"reward_waiting/{name}"] = fmean(s.waited for s in scored)
        if any(s.retries is not None for s in scored):
            metrics[f"reward_retries/{name}"] = float(sum(s.retries or 0 for s in scored))
    return metrics


@dataclass(frozen=True)
class Sources:
    """The sources of a mixture, whose tasks are numbered one source after the other."""

    names: Sequence[str]
    sizes: Sequence[int]
    pass_reward: float  # with which a sample passes

    def metrics(self, groups: Sequence[GroupSummary]) -> dict[str, float]:
        """Of each source its share of a step's samples, their mean reward and pass rate, if it has any."""
        ends = list(accumulate(self.sizes))
        rewards: dict[str, list[float]] = {name: [] for name in self.names}
        for group in groups:
            of_source = rewards[self.names[bisect_right(ends, group.task_index)]]
            of_source += [t.reward for t in group.trajectories if t.error is None]
        total = max(1, sum(map(len, rewards.values())))  # every environment may have failed
        metrics = {}
        for name, of_source in rewards.items():
            metrics[f"source/{name}/share"] = len(of_source) / total
            if of_source:
                metrics[f"source/{name}/reward"] = fmean(of_source)
                metrics[f"source/{name}/pass_rate"] = fmean(r >= self.pass_reward for r in of_source)
        return metrics


def optimizer_metrics(updates: Sequence[TrainStats], left_out: int = 0) -> dict[str, float]:
    """Gradient norm, learning rate, tokens and number of updates of a step; counts alone without any update.

    `left_out` updates were not made, because none of their trajectories trains. They count as empty.
    """
    counts = {
        "updates/all": float(len(updates) + left_out),
        "updates/skipped": float(sum(u.skipped for u in updates)),
        "updates/empty": float(sum(u.empty for u in updates) + left_out),
    }
    if not updates:
        return counts
    loads = [u.experts for u in updates if u.experts is not None]
    return {
        **guard_metrics(updates),
        **{name: sum(load[name] for load in loads) / len(loads) for name in (loads or [{}])[0]},
        **{name: sum(u.mtp[name] for u in updates) / len(updates) for name in updates[0].mtp},
        **{name: sum(u.draft[name] for u in updates) / len(updates) for name in updates[0].draft},
        "grad_norm": sum(u.grad_norm for u in updates) / len(updates),
        "lr": updates[-1].lr,
        **counts,
        "tokens/trained": float(sum(u.num_tokens for u in updates)),
        **({"flops/training": sum(u.flops for u in updates)} if any(u.flops for u in updates) else {}),
        **({} if (peak := updates[0].peak_tflops) is None else {"tflops/peak": peak}),
        "packing/shared": 1 - sum(u.num_distinct for u in updates) / sum(u.num_tokens for u in updates),
        "packing/padding": 1 - sum(u.num_distinct for u in updates) / sum(u.num_computed for u in updates),
    }


def guard_metrics(updates: Sequence[TrainStats]) -> dict[str, float]:
    """Updates beyond a limit, for each quantity that has limits; empty updates have no values."""
    names = dict.fromkeys(name for update in updates for name in update.guards)
    return {f"guards/{name}": float(sum(u.guards.get(name, False) for u in updates)) for name in names}


def samples_of(step: int, groups: Sequence[GroupSummary], phase: Phase) -> Iterator[Sample]:
    for group in groups:
        for text in group.texts:
            t = group.trajectories[text.sample]
            yield Sample(
                step=step,
                phase=phase,
                task=group.task_index,
                prompt=text.prompt,
                completion=text.completion,
                reward=t.reward,
                rewards=t.rewards,
                stop=str(t.stop),
                prompt_tokens=t.num_tokens - t.num_sampled,
                sampled_tokens=t.num_sampled,
                seconds_environment=t.seconds_environment,
                answer=text.answer,
                error=t.error,
            )


def rows_of(
    step: int,
    groups: Sequence[GroupSummary],
    phase: Phase,
    validation_set: str = "",
    trained: Mapping[SequenceKey, Trained] | None = None,
    stored: Collection[int] = (),
) -> Iterator[TrajectoryRow]:
    """Rows of the index. `stored` are the groups whose tokens are in files.

    Without `trained` a sample of training counts as one that trains unless it failed.
    """
    for group in groups:
        for sample, t in enumerate(group.trajectories):
            of_sequences = [trained.get((group.reference, s.row)) for s in t.sequences] if trained else []
            known = [each for each in of_sequences if each is not None and each.num_tokens]
            total = sum(each.num_tokens for each in known)
            weighted = [(each, each.num_tokens / total) for each in known]
            yield TrajectoryRow(
                step=step,
                phase=phase,
                validation_set=validation_set,
                group=group.group,
                sample=sample,
                task=group.task_index,
                environment=group.environment,
                player=t.player,
                fork=t.fork,
                turns=t.num_turns,
                tokens=t.num_tokens,
                sampled=t.num_sampled,
                reward=t.reward,
                rewards=t.rewards,
                stop=str(t.stop),
                failed=t.error is not None,
                trains=phase == "training" and t.trains if trained is None else total > 0,
                stored=group.group in stored,
                min_version=t.min_version,
                max_version=t.max_version,
                retries=t.num_retries,
                advantage=sum(e.advantage * share for e, share in weighted) if known else math.nan,
                logprob_gap=sum(e.logprob_gap * share for e, share in weighted) if known else math.nan,
                seconds_generation=t.seconds_generation,
                seconds_environment=t.seconds_environment,
            )


class LogprobGapTooLarge(RunError):
    """Engine and trainer disagree; the message has the values and the likely causes."""


@dataclass
class LogprobGate:
    """Stops a run whose engine samples from another policy than the one that learns."""

    config: OnlineBase
    generation: GenerationBase
    guarded: bool = False  # a guard of updates decides after the first batch
    compared: bool = False  # this process has compared engine and trainer once

    def due(self, step: int) -> bool:
        """True if the batch of this step is compared before its update."""
        period = self.config.logprob_gap_period
        return not self.compared or (period is not None and step % period == 0)

    def check(self, metrics: Mapping[str, float], sampled_by: range, version: int) -> None:
        """Raise LogprobGapTooLarge where `logprob_gap/mean` or `logprob_gap/max` passes its limit."""
        if self.guarded and self.compared:
            return
        self.compared = True
        # Of stale samples those of the youngest weights are compared: the others differ by more updates.
        # Each update since allows as much again: it changes the policy, which is no error of the engine.
        ages = (age for age in range(self.config.max_staleness + 1) if f"staleness/gap_{age}" in metrics)
        if (age := next(ages, None)) is None:
            age, mean, largest = 0, metrics["logprob_gap/mean"], metrics["logprob_gap/max"]
        else:
            mean, largest = metrics[f"staleness/gap_{age}"], metrics[f"staleness/gap_max_{age}"]
        limit, token_limit = self.config.max_logprob_gap, self.config.max_token_logprob_gap
        if not mean <= (1 + age) * limit:  # also of a NaN
            broken = f"algorithm.max_logprob_gap allows a mean of {limit:g}"
        elif token_limit is not None and not largest <= (1 + age) * token_limit:
            broken = f"algorithm.max_token_logprob_gap allows {token_limit:g} at a token"
        else:
            return
        if age:
            broken += f", and the age of the tokens, {age}, as much again for each update"
        raise LogprobGapTooLarge(
            f"engine and trainer disagree on the logprobs of the same tokens: the mean difference is "
            f"{mean:.4g}, the largest {largest:.4g}; {broken}. Likely causes:"
            + "".join(f"\n  - {cause}" for cause in self._causes(sampled_by, version))
        )

    def _causes(self, sampled_by: range, version: int) -> Iterator[str]:
        """Known causes of a gap with the values of this run; the one that was just observed comes first."""
        if (start := sampled_by.start) < version:
            versions = f"{start} to {sampled_by.stop - 1}"
            yield f"stale weights: tokens are of versions {versions}, and the trainer's weights of {version}"
            if self.generation.on_update == "continue":
                kept = "sequences keep the keys and values of the weights before an update"
                yield f"generation.on_update is continue: {kept}; restart computes them again"
        missing = "" if self.generation.takes_weights else "; this back end gets none from the run"
        yield f"other weights, or another tokenizer, in the engine than in the trainer{missing}"
        yield (
            "another distribution: the trainer computes with generation.sampling.temperature, which is "
            f"{self.generation.sampling.temperature:g}, and without top-p, top-k, min-p and penalties; the "
            "engine's logprobs must be of the same (vLLM's own server: --logprobs-mode processed_logprobs)"
        )
        precision = f"precision: generation.precision is {self.generation.precision or 'that of the policy'}"
        yield f"{precision}; bfloat16, and quantized weights or caches, on one side widen the gap"
        different = "rope scaling, norm epsilon, sliding windows, tied embeddings"
        yield f"a model that the two implement differently: {different}"
        if 0 < version <= start:
            see = "see grad_norm and entropy of the steps before in metrics.jsonl"
            yield f"an update so large that the policy broke down: {see}"


def versions_of(groups: Sequence[GroupSummary]) -> range:
    """The versions that sampled the tokens of trajectories without errors; empty without any."""
    sampled = [t for group in groups for t in group.trajectories if t.error is None and t.num_sampled]
    oldest = min((t.min_version for t in sampled), default=0)
    return range(oldest, max((t.max_version for t in sampled), default=-1) + 1)
