"""Where the turns of trajectories lie in a packed batch, and what was paid for each."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from nemorl.trajectories import Trajectory

from .packed import PackedBatch


def with_turns(
    batch: PackedBatch, trajectories: Sequence[Trajectory], rewards: Sequence[tuple[float, ...]]
) -> PackedBatch:
    """The batch of these trajectories with `turns` and `rewards`, which are given turn by turn.

    A turn is paid at its last token. What is paid for a turn without tokens comes at the last one before it,
    and turns are numbered without it. A sequence that does not train, which a stand-in may hold the place of,
    has neither.
    """
    turns = torch.full((batch.num_tokens,), -1)
    paid = torch.zeros(batch.num_tokens)
    borders = pairwise(batch.cu_seqlens.tolist())
    for (start, end), trajectory, by_turn in zip(borders, trajectories, rewards, strict=True):
        if not bool(batch.loss_mask[start:end].any()):
            continue
        number, last = -1, None
        for turn, reward in zip(trajectory.turns, by_turn, strict=True):
            if turn.end > turn.start:
                number, last = number + 1, start + turn.end - 1
                turns[start + turn.start : start + turn.end] = number
            if last is not None:
                paid[last] += reward
    return replace(batch, turns=turns, rewards=paid)
