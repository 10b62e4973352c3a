"""Training on stored groups: what takes the place of the rollout workers, and what has to fit."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from nemorl.config.algorithm.online import OnlineBase
from nemorl.config.base import counted
from nemorl.config.experiment import Experiment
from nemorl.errors import Problem, Problems

from .collector import RolloutFailed
from .groups import GroupAssignment, GroupSummary
from .stored import RolloutFiles, SampledBy, StoredRolloutError

OPTION = "--replay"


Stored = Sequence[tuple[int, GroupSummary]]  # groups in their order, with their steps


def places_of(stored: Stored) -> list[tuple[int, int]]:
    """Step and place in it of each group."""
    return [
        (step, place)
        for step, of_step in groupby(step for step, _ in stored)
        for place, _ in enumerate(of_step)
    ]


class ReplayedGroups:
    """Instead of a rollout worker: hands out stored groups, the first one as group 0 of the run."""

    is_up = True

    def __init__(self, files: RolloutFiles, store: Callable[[Sequence[Any]], Any]) -> None:
        """`store` returns a reference to a list of sequences. Raises StoredRolloutError."""
        self._files, self._store = files, store
        self._places = places_of(list(files.summaries()))

    async def run_groups(self, assignments: list[GroupAssignment]) -> AsyncIterator[GroupSummary]:
        """Raises RolloutFailed for a group that is not stored, or not accepted, and StoredRolloutError."""
        for assignment in assignments:
            number = assignment.group
            if assignment.attempt or number >= len(self._places):
                what = "was not accepted" if assignment.attempt else "is not stored"
                raise RolloutFailed(f"group {number} {what}, and nothing is sampled with {OPTION}")
            stored = await asyncio.to_thread(self._files.group, *self._places[number])
            reference = self._store([replace(each, group=number) for each in stored.sequences])
            yield replace(stored.summary, group=number, reference=reference)

    async def abort_stale(self, oldest: int) -> None:
        """Nothing is in progress."""

    async def abort_groups(self, groups: list[int]) -> None:
        """Nothing is in progress."""


def replay_problems(experiment: Experiment, files: RolloutFiles) -> Problems:
    """Why the experiment cannot train on stored groups."""
    algorithm = experiment.algorithm
    if not isinstance(algorithm, OnlineBase):
        fix = f"it trains without sampling; remove {OPTION}"
        yield Problem("algorithm.name", algorithm.name, fix)
        return
    try:
        sampled_by, listed = files.origin(), list(files.summaries())
    except StoredRolloutError as error:
        fix = "name a run folder of `nemorl rollout`, or of a run with logger.trajectories"
        yield Problem(OPTION, str(files.folder.parent), f"{error}; {fix}")
        return
    yield from _other_origin(experiment, sampled_by)
    if algorithm.validation.scheduled:
        fix = f"no engine is started with {OPTION}; set period to null, at_start and at_end to false"
        yield Problem("algorithm.validation", "set", fix)
    if algorithm.filters.refill is not None:
        fix = f"with {OPTION} no other groups can be sampled; set it to null"
        yield Problem("algorithm.filters.refill", "set", fix)
    size, steps = algorithm.num_prompts_per_step, algorithm.num_steps
    if len(listed) < (needed := steps * size + algorithm.extra_groups):
        fix = f"{counted(needed, 'group')} are required and {len(listed)} are stored; lower it"
        yield Problem(
            "algorithm.num_steps", steps, f"{fix}, or sample more with `nemorl rollout --n {needed}`"
        )
        return
    listed = listed[:needed]
    stored = [group for _, group in listed]
    samples = algorithm.num_generations_per_prompt
    counts = {group.num_samples for group in stored}
    if counts != {samples}:
        there = " or ".join(map(str, sorted(counts)))
        yield Problem(
            "algorithm.num_generations_per_prompt", samples, f"stored groups have {there}; set that"
        )
    if algorithm.greedy_baseline and any(group.greedy is None for group in stored):
        fix = "stored groups have no greedy sample; use another advantage, or sample again with this one"
        yield Problem("algorithm.advantage", "set", fix)
    yield from _wrong_tokens(experiment, files, listed)
    yield from _wrong_versions(algorithm, stored)


def _other_origin(experiment: Experiment, sampled_by: SampledBy) -> Problems:
    try:
        ours = SampledBy.of(experiment)
    except OSError:  # no tokenizer, which other checks report
        return
    if ours.tokenizer != sampled_by.tokenizer:
        fix = (
            f"another tokenizer, that of {sampled_by.model}, made the stored tokens; use it, or sample again"
        )
        yield Problem("policy.model_path", ours.model, fix)
    if ours.temperature != sampled_by.temperature:
        fix = f"the stored logprobs are of the temperature {sampled_by.temperature:g}; set that"
        yield Problem("generation.sampling.temperature", ours.temperature, fix)
    if ours.filters != sampled_by.filters and experiment.algorithm.trains_filtered:
        there = ", ".join(f"{name} {value:g}" for name, value in sampled_by.filters.items())
        fix = f"the stored logprobs are of samples with {there or 'no top_k, top_p and min_p'}; set that"
        yield Problem("generation.sampling", ours.filters, fix)
    if ours.reward_weights != sampled_by.reward_weights:
        there = ", ".join(f"{name} {weight:g}" for name, weight in sampled_by.reward_weights.items())
        fix = f"the stored rewards have the weights {there or 'of no reward'}; set env and rewards to these"
        yield Problem("rewards", ours.reward_weights, fix)
    flagged = getattr(experiment.algorithm, "flagged_advantages", {})
    if flagged and ours.turn_flags != sampled_by.turn_flags:
        there = ", ".join(f"{path}.turn_flags" for path in sampled_by.turn_flags) or "none"
        fix = f"the stored turns have other flags ({there}); set turn_flags to those, or sample again"
        yield Problem("algorithm.flagged_advantages", flagged, fix)
    if ours.data != sampled_by.data:
        fix = "the stored groups are of another dataset; set data.train to that of the run that sampled them"
        yield Problem("data.train", ours.data.get("name"), fix)


def _wrong_tokens(experiment: Experiment, files: RolloutFiles, listed: Stored) -> Problems:
    """The first sequence that is too long, and the first one without a logprob."""
    limit, longest, lacks = experiment.policy.max_sequence_length, 0, None
    for step, place in places_of(listed):
        try:
            group = files.group(step, place)
        except StoredRolloutError as error:
            yield Problem(OPTION, str(files.folder.parent), f"{error}; sample again")
            return
        longest = max([longest, *(each.num_tokens for each in group.sequences)])
        for each in group.sequences:
            if lacks is None and not np.isfinite(each.logprobs[each.loss_mask]).all():
                lacks = f"group {group.summary.group} of step {step}"
    if longest > limit:
        fix = f"a stored sequence has {counted(longest, 'token')}; set it to as many or more"
        yield Problem("policy.max_sequence_length", limit, fix)
    if lacks is not None:
        fix = (
            f"{lacks} has tokens without a logprob, which its engine did not return; sample with another one"
        )
        yield Problem(OPTION, str(files.folder.parent), fix)


def _wrong_versions(algorithm: OnlineBase, stored: Sequence[GroupSummary]) -> Problems:
    """The age of each group in the step that trains on it, as sampling would bound it."""
    oldest, size = 0, algorithm.num_prompts_per_step
    for number, group in enumerate(stored[: algorithm.num_steps * size]):
        version = number // size  # of the weights that the step trains
        versions = {each for t in group.trajectories for each in t.versions}
        if versions and max(versions) > version:
            fix = (
                f"step {version + 1} would train on tokens of version {max(versions)}; name a run that begins"
            )
            yield Problem(OPTION, max(versions), f"{fix} with the weights of this one")
            return
        oldest = max([oldest, *(version - each for each in versions)])
    if oldest > algorithm.max_staleness:
        fix = f"stored groups are up to {counted(oldest, 'update')} older than the weights that train on them"
        yield Problem(
            "algorithm.max_staleness", algorithm.max_staleness, f"{fix}; set it to {oldest} or more"
        )
