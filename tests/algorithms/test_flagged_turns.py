"""Advantages of flagged turns against a loop over tokens."""

from typing import Any

import pytest
import torch

from nemorl.algorithms.objective import EntropyWeight
from nemorl.algorithms.policy_gradient import PolicyGradientUpdate, branches_as_samples, with_flags
from nemorl.config.algorithm import OnlineConfig
from nemorl.data.packed import pack_trajectories
from nemorl.data.shards import SequencePlace
from nemorl.rollout.groups import Branch, GroupSummary
from tests.algorithms.groups import failed, group, score, trajectory
from tests.rollout.stored import trajectory as sequence

FLAGS = ((), ("loud",), ("rude", "loud"))
ADVANTAGES = {"rude": -5.0, "loud": -2.0}


def config(**fields: Any) -> OnlineConfig:
    counts = {"name": "grpo", "num_steps": 9, "num_prompts_per_step": 2, "num_generations_per_prompt": 2}
    advantage = {"name": "group", "normalize": False}
    return OnlineConfig.model_validate({**counts, "advantage": advantage, **fields})


def member(reward: float, row: int, flags: tuple[tuple[str, ...], ...] = ()) -> Any:
    turns: Any = {"num_turns": 3, "turn_rewards": (0.0,) * 3, "turn_flags": flags}
    return trajectory(reward, row, 6, **turns)


def found(of_config: OnlineConfig, *groups: GroupSummary) -> dict[tuple[Any, int], SequencePlace]:
    return {(p.store, p.row): p for p in score(of_config, groups)}


def test_flagged_turns_have_their_own_advantage() -> None:
    """Each token of a turn: the number of its first listed flag, or what its sample earned."""
    groups = group(0, member(1.0, 0, FLAGS), member(0.0, 1)), group(1, member(1.0, 0), member(1.0, 1, FLAGS))
    places = found(config(flagged_advantages=ADVANTAGES), *groups)
    for (store, row), mean in (("store-0", 0), 0.5), (("store-0", 1), 0.5), (("store-1", 1), 1.0):
        number, of_group = int(store[-1]), groups[int(store[-1])]
        one = of_group.trajectories[row]
        expected = []
        for turn in range(3):
            advantage = one.reward - mean
            for flag in reversed(ADVANTAGES):  # the first one last
                if one.turn_flags and flag in one.turn_flags[turn]:
                    advantage = ADVANTAGES[flag]
            expected += [advantage] * 2
        packed = pack_trajectories([sequence(2, 2, 2, group=number)], [places[store, row].advantage], [1.0])
        assert packed.advantages is not None
        assert packed.advantages[packed.loss_mask].tolist() == pytest.approx(expected)
        assert not torch.any(packed.advantages[~packed.loss_mask])


def test_bounds_apply_afterwards() -> None:
    clipped = config(flagged_advantages=ADVANTAGES, advantage_clip={"low": -3.0, "high": 0.25})
    places = found(clipped, group(0, member(1.0, 0, FLAGS), member(0.0, 1)), group(1, failed(0), failed(1)))
    assert places["store-0", 0].advantage == (0.25, -2.0, -3.0)
    assert places["store-0", 1].advantage == -0.5


def test_advantages_of_turns_are_replaced_one_by_one() -> None:
    assert with_flags((1.0, 2.0, 3.0), FLAGS, ADVANTAGES) == (1.0, -2.0, -5.0)
    assert with_flags(1.0, FLAGS, {"loud": -2.0}) == (1.0, -2.0, -2.0)
    assert with_flags(1.0, FLAGS, {"other": -2.0}) == 1.0
    assert with_flags(1.0, (), ADVANTAGES) == 1.0


@pytest.mark.parametrize("compares", ["samples", "branches"])
def test_each_branch_has_the_flags_of_its_turns(compares: str) -> None:
    branches = (Branch(0, 9, 4, (0.0, 0.0), FLAGS[:2]), Branch(1, 8, 2, (0.0,), FLAGS[2:]))
    fields: Any = {"num_turns": 3, "turn_rewards": (0.0,) * 3, "turn_flags": FLAGS, "branches": branches}
    of_config = config(flagged_advantages=ADVANTAGES, compares=compares)
    others = group(1, trajectory(0.0), trajectory(0.0, 1))
    sample = trajectory(1.0, 1, 6, **fields)
    assert [one.turn_flags for one in branches_as_samples(sample)] == [FLAGS[:2], FLAGS[2:]]
    places = found(of_config, group(0, sample, trajectory(0.0, 2)), others)
    own = 0.5 if compares == "samples" else -1 / 3  # the first branch earned nothing, as the other sample
    assert places["store-0", 0].advantage == pytest.approx((own, -2.0))
    assert places["store-0", 1].advantage == (-5.0,)


def test_failed_samples_train_nothing() -> None:
    lost: Any = {"error": "the environment hung", "trains": False, "turn_flags": FLAGS, "num_turns": 3}
    lost |= {"turn_rewards": (0.0,) * 3}
    others = group(1, member(0.0, 0), member(1.0, 1))
    of_group = group(0, trajectory(0.0, 0, **lost), member(1.0, 1))
    places = found(config(flagged_advantages=ADVANTAGES), of_group, others)
    assert (places["store-0", 0].advantage, places["store-0", 0].weight) == (0.0, 0.0)


def test_a_divergence_in_the_reward_leaves_them() -> None:
    kl = {"coefficient": 0.1, "placement": "reward", "estimator": "k1"}
    of_config = config(flagged_advantages=ADVANTAGES, kl=kl)
    update = PolicyGradientUpdate(of_config, EntropyWeight.of(of_config.entropy))
    groups = [group(0, member(1.0, 0, FLAGS), member(0.0, 1)), group(1, member(0.0, 0), member(0.0, 1))]
    batch = update.prepare(groups, 1)
    assert batch.penalty is not None
    places = {(p.store, p.row): p.advantage for p in batch.penalty.estimate([1.0, 0.0, 0.0, 0.0])}
    assert places["store-0", 0] == pytest.approx(((0.9 - 0.0) / 2, -2.0, -5.0))
