"""Samples with arrays that name their tokens, for tests of stored groups."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nemorl.rollout.groups import GroupSummary, summarize
from nemorl.rollout.stored import StoredGroup, spread
from nemorl.trajectories import StopReason, Trajectory, Turn


def trajectory(
    *turns: int, reward: float = 1.0, group: int = 0, version: int = 0, experts: bool = False
) -> Trajectory:
    """Two tokens of a prompt, then turns of as many tokens, with a token between them."""
    sampled: list[bool] = [False]
    spans = []
    for length in turns:
        sampled.append(False)
        spans.append(Turn(len(sampled), len(sampled) + length, StopReason.STOP, {"point": reward}, reward))
        sampled += [True] * length
    mask = np.array(sampled)
    tokens = np.arange(len(mask), dtype=np.int32) + 2
    return Trajectory(
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, -tokens / 100, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=tuple(spans),
        rewards={"point": reward},
        reward=reward,
        stop=StopReason.STOP,
        group=group,
        task=group + 100,
        seconds_generation=0.5,
        routed_experts=np.full((len(mask), 2, 1), 3, dtype=np.int16) if experts else None,
    )


def stored(
    number: int, samples: Sequence[Sequence[Trajectory]], advantage: float = 0.5, step: int = 1
) -> StoredGroup:
    """A group of samples, each of one or several sequences."""
    summaries, sequences = [], []
    for of_sample in samples:
        summaries.append(summarize(of_sample, len(sequences)))
        sequences += of_sample
    summary = GroupSummary(number, number + 100, None, tuple(summaries))
    return StoredGroup(step, summary, tuple(sequences), tuple(spread(each, advantage) for each in sequences))


def failed(of: Trajectory, error: str) -> Trajectory:
    return replace(of, loss_mask=np.zeros_like(of.loss_mask), rewards={}, reward=0.0, error=error)
