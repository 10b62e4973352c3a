from dataclasses import replace

import numpy as np
import pytest

from nemorl.data.examples import Example
from nemorl.data.packed import PLACEHOLDER_TOKENS, pack_examples, pack_trajectories
from nemorl.trajectories import StopReason, Trajectory, Turn


def trajectory(tokens, mask) -> Trajectory:
    mask = np.array(mask, dtype=bool)
    return Trajectory(
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5 * np.arange(len(mask)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=(Turn(1, len(tokens), StopReason.STOP),),
        rewards={},
        reward=0.0,
        stop=StopReason.STOP,
        group=0,
        task=0,
    )


def test_trajectories_lie_end_to_end():
    batch = pack_trajectories(
        [trajectory([5, 6, 7], [0, 1, 1]), trajectory([8, 9], [0, 1])], [2.0, -1.0], weights=[0.25, 0.5]
    )
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.lengths == [3, 2]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert batch.weights.tolist() == [0, 0.25, 0.25, 0, 0.5]
    assert batch.advantages.tolist() == [0, 2, 2, 0, -1]
    assert batch.logprobs.tolist() == [0, -0.5, -1, 0, -0.5]
    assert batch.old_logprobs is None
    assert batch.reference_logprobs is None


@pytest.mark.parametrize("tokens", [[], [5], list(range(400))])
def test_one_untrained_token_replaces_a_failed_trajectory(tokens):
    failed = replace(trajectory(tokens, [0] * len(tokens)), error="the environment did not answer")
    batch = pack_trajectories([failed, trajectory([8, 9], [0, 1])], [0.0, -1.0], weights=[0.0, 0.5])
    assert batch.lengths == [PLACEHOLDER_TOKENS, 2]
    assert batch.loss_mask.tolist() == [False, False, True]
    assert batch.weights.tolist() == [0, 0, 0.5]


def test_what_has_no_weight_becomes_a_stand_in():
    batch = pack_trajectories(
        [trajectory([5, 6, 7], [0, 1, 1]), trajectory([8, 9], [0, 1])], [0.0, -1.0], weights=[0.0, 0.5]
    )
    assert batch.lengths == [PLACEHOLDER_TOKENS, 2]
    assert batch.loss_mask.tolist() == [False, False, True]


def test_each_turn_may_have_an_advantage_of_its_own():
    turns = (Turn(1, 3, StopReason.STOP), Turn(4, 6, StopReason.STOP))
    two = replace(trajectory([5, 6, 7, 8, 9, 10], [0, 1, 1, 0, 1, 1]), turns=turns)
    batch = pack_trajectories([two, trajectory([8, 9], [0, 1])], [(2.0, -0.5), 1.0], weights=[0.25, 0.5])
    assert batch.advantages.tolist() == [0, 2, 2, 0, -0.5, -0.5, 0, 1]


def test_examples_carry_no_advantages():
    example = Example(np.array([1, 2, 3], dtype=np.int32), np.array([False, True, True]))
    batch = pack_examples([example, example], weights=[0.5, 0.125])
    assert batch.weights.tolist() == [0, 0.5, 0.5, 0, 0.125, 0.125]
    assert batch.advantages is None
    assert batch.logprobs is None


def test_a_first_token_cannot_train():
    with pytest.raises(ValueError, match="sequence 0 starts with a trained token"):
        pack_trajectories([trajectory([5], [1])], [1.0], [1.0])
    with pytest.raises(ValueError, match="1 sequences with 2 weights"):
        pack_trajectories([trajectory([5, 6], [0, 1])], [1.0], [1.0, 1.0])


def test_routed_experts_lie_end_to_end_and_are_unknown_where_they_are_not_reported():
    told = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    trajectories = [
        trajectory([8, 9], [0, 1]),
        replace(trajectory([5, 6, 7], [0, 1, 1]), routed_experts=told),
        replace(trajectory([5], [0]), routed_experts=told[:1], error="the environment failed"),
    ]
    batch = pack_trajectories(trajectories, [1.0, 1.0, 1.0], weights=[0.5, 0.5, 0.5])
    assert batch.routed_experts.tolist() == [[[-1, -1]] * 2] * 2 + told.tolist() + [[[-1, -1]] * 2]
    assert batch.select([1]).routed_experts.tolist() == told.tolist()
    assert pack_trajectories(trajectories[:1], [1.0], weights=[0.5]).routed_experts is None


def test_routed_experts_are_of_the_tokens():
    with pytest.raises(ValueError, match="differ in length"):
        replace(trajectory([8, 9], [0, 1]), routed_experts=np.zeros((3, 1, 1), dtype=np.int16))
