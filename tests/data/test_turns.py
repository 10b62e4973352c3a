"""Turns and their rewards in a packed batch."""

import numpy as np

from nemorl.data.packed import pack_trajectories, with_turns
from nemorl.trajectories import StopReason, Trajectory, Turn


def trajectory(*parts: int, error: str | None = None) -> Trajectory:
    """Lengths of prompt, turn, observation, turn ..."""
    mask = np.concatenate([np.full(size, number % 2 == 1) for number, size in enumerate(parts)])
    starts = np.cumsum((0, *parts)).tolist()
    turns = tuple(Turn(starts[n], starts[n + 1], StopReason.STOP) for n in range(1, len(parts), 2))
    return Trajectory(
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask & (error is None),
        logprobs=np.zeros(len(mask), dtype=np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=turns,
        rewards={},
        reward=0.0,
        stop=StopReason.STOP,
        group=0,
        task=0,
        error=error,
    )


def test_each_turn_is_rewarded_at_its_last_token() -> None:
    # Two turns around an observation of one token; a failure; a turn of no tokens in the middle.
    trajectories = [trajectory(2, 3, 1, 2), trajectory(2, 2, error="fell"), trajectory(1, 2, 2, 0, 1, 1)]
    batch = pack_trajectories(trajectories, [0.0] * 3, [1.0, 0.0, 1.0])
    batch = with_turns(batch, trajectories, [(0.5, 1.0), (), (2.0, 4.0, 8.0)])
    nothing, stand_in = [-1, -1], [-1]
    first = [*nothing, 0, 0, 0, -1, 1, 1]
    assert batch.turns is not None
    assert batch.turns.tolist() == [*first, *stand_in, -1, 0, 0, -1, -1, -1, 1]
    assert batch.rewards is not None
    # What was rewarded for the turn without tokens comes with the turn before it.
    assert batch.rewards.tolist() == [0, 0, 0, 0, 0.5, 0, 0, 1.0, 0, 0, 0, 6.0, 0, 0, 0, 8.0]
