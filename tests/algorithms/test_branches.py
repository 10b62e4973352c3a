"""Samples of several sequences: together they weigh as one, and share its advantage unless each has one."""

import statistics
from typing import Any, get_args

import pytest

from nemorl.algorithms.objective import EntropyWeight
from nemorl.algorithms.policy_gradient import PolicyGradientUpdate, branch_advantages, branch_rewards
from nemorl.config.algorithm import Aggregation, OnlineConfig
from nemorl.data.packed import PLACEHOLDER_TOKENS
from nemorl.data.shards import SequencePlace
from nemorl.rollout.groups import Branch, GroupSummary, TrajectorySummary
from tests.algorithms.groups import group, score, trajectory

TURNS = (0.5, 0.25, 0.0)  # rewards that the environment gave


def whole(reward: float, row: int) -> TrajectorySummary:
    return trajectory(reward, row, 9, num_turns=3, turn_rewards=TURNS)


def branched(reward: float, row: int) -> TrajectorySummary:
    """The same sample as two sequences of two turns and one, from this row on."""
    branches = (Branch(row, 9, 5, TURNS[:2]), Branch(row + 1, 12, 4, TURNS[2:]))
    fields: Any = {"num_turns": 3, "turn_rewards": TURNS, "branches": branches}
    return trajectory(reward, row + 1, 9, **fields)


def config(**fields: Any) -> OnlineConfig:
    counts = {"name": "grpo", "num_steps": 9, "num_prompts_per_step": 2, "num_generations_per_prompt": 2}
    return OnlineConfig.model_validate({**counts, **fields})


def groups(sample: Any, rows: tuple[int, int]) -> list[GroupSummary]:
    return [
        group(0, sample(1.0, rows[0]), trajectory(0.0, rows[1], 6)),
        group(1, trajectory(0.0, 0, 2), trajectory(1.0, 1, 7)),
    ]


def trained(places: list[SequencePlace]) -> dict[tuple[Any, int], SequencePlace]:
    return {(p.store, p.row): p for p in places if p.weight > 0}


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_branches_weigh_as_one_sequence(aggregation: str, num_minibatches: int) -> None:
    loss = {"aggregation": aggregation}
    if aggregation.endswith("norm"):
        loss["aggregation_length"] = 8  # type: ignore[assignment]
    of_config = config(loss=loss, num_minibatches=num_minibatches)
    one = trained(score(of_config, groups(whole, (0, 1))))
    two = trained(score(of_config, groups(branched, (0, 2))))
    # The other sample of the group has moved by a row.
    same = {("store-0", 0): 0, ("store-0", 1): 0, ("store-0", 2): 1}
    for (store, row), place in two.items():
        before = one[store, same.get((store, row), row)]
        assert (place.weight, place.advantage) == (before.weight, before.advantage)
    assert [two["store-0", row].num_tokens for row in (0, 1)] == [9, 12]


def test_minibatches_have_equally_many_sequences() -> None:
    places = score(config(num_minibatches=2), groups(branched, (0, 2)))
    assert [(p.store, p.row) for p in places[:3]] == [("store-0", 0), ("store-0", 1), ("store-0", 2)]
    *_, filler = places
    assert len(places) == 6
    assert (filler.weight, filler.num_tokens, filler.store) == (0.0, PLACEHOLDER_TOKENS, "store-1")


def test_turns_keep_their_advantages_and_rewards() -> None:
    assert branch_advantages(branched(1.0, 0), (1.0, 2.0, 3.0)) == [(1.0, 2.0), (3.0,)]
    # A total of 1, of which the turns before the last one have 0.75.
    assert branch_rewards(whole(1.0, 0)) == [(0.5, 0.25, 0.25)]
    assert branch_rewards(branched(1.0, 0)) == [(0.5, 0.5), (0.25,)]


def test_the_divergence_of_all_branches_is_subtracted() -> None:
    kl = {"coefficient": 0.1, "placement": "reward"}
    of_config = config(kl=kl, advantage={"name": "group", "normalize": False})
    update = PolicyGradientUpdate(of_config, EntropyWeight.of(of_config.entropy))
    batch = update.prepare(groups(branched, (0, 2)), 1)
    assert batch.penalty is not None
    divergences = [1.0, 2.0, 0.5, 0.0, 0.0]
    advantages = {(p.store, p.row): p.advantage for p in batch.penalty.estimate(divergences)}
    # Rewards 1 - 0.1 * 3 and 0 - 0.1 * 0.5 less their mean.
    assert advantages["store-0", 0] == advantages["store-0", 1] == pytest.approx((0.7 + 0.05) / 2)
    assert advantages["store-0", 2] == pytest.approx(-(0.7 + 0.05) / 2)


def test_a_critic_learns_from_all_branches() -> None:
    of_config = config(name="ppo", critic={"aggregation": "seq-mean-token-mean"}, num_minibatches=2)
    update = PolicyGradientUpdate(of_config, EntropyWeight.of(of_config.entropy))
    batch = update.prepare(groups(branched, (0, 2)), 1)
    weights = [p.weight for p in batch.critic_sequences]
    assert weights == pytest.approx([1 / 18, 1 / 18, 1 / 12, 1 / 4, 1 / 14, 0])
    assert [p.rewards for p in batch.sequences][:2] == [(0.5, 0.5), (0.25,)]


class TestComparedBranches:
    """`compares: branches`: what counts are the rewards of each branch's own turns."""

    # The branches of the first sample earned 0.75 and 0, and 0.25 of its total of 1 are of the whole sample.
    SHARES = (0.75, 0.25)

    def advantages(self, **fields: Any) -> dict[tuple[Any, int], Any]:
        of_config = config(compares="branches", **fields)
        return {
            at: place.advantage for at, place in trained(score(of_config, groups(branched, (0, 2)))).items()
        }

    def test_each_is_a_member_of_its_group(self) -> None:
        found = self.advantages(advantage={"name": "group", "epsilon": 1e-9})
        # Group 0 has the branches and another sample with reward 0, group 1 two samples without branches.
        for store, rewards in (("store-0", (*self.SHARES, 0.0)), ("store-1", (0.0, 1.0))):
            center, deviation = statistics.mean(rewards), statistics.stdev(rewards)
            for row, reward in enumerate(rewards):
                assert found[store, row] == pytest.approx((reward - center) / deviation)

    def test_lengths_are_those_of_branches(self) -> None:
        found = self.advantages(advantage={"name": "opo"})
        # sum(l r) / sum(l) of branches with 5 and 4 sampled tokens and a sample with 6.
        baseline = (5 * 0.75 + 4 * 0.25 + 6 * 0.0) / (5 + 4 + 6)
        expected = [0.75 - baseline, 0.25 - baseline, -baseline]
        assert [found["store-0", row] for row in range(3)] == pytest.approx(expected)

    def test_their_weight_stays_that_of_one_sequence(self) -> None:
        places = [
            trained(score(config(compares=units), groups(branched, (0, 2))))
            for units in ("samples", "branches")
        ]
        samples, branches = ({at: p.weight for at, p in of_one.items()} for of_one in places)
        assert samples == branches

    def test_a_sample_alone_compares_its_branches(self) -> None:
        of_config = config(
            num_generations_per_prompt=1, compares="branches", advantage={"name": "group", "normalize": False}
        )
        places = trained(score(of_config, [group(0, branched(1.0, 0)), group(1, trajectory(1.0, 0))]))
        assert [places["store-0", row].advantage for row in (0, 1)] == pytest.approx([0.25, -0.25])

    def test_each_loses_its_own_divergence(self) -> None:
        kl = {"coefficient": 0.1, "placement": "reward"}
        of_config = config(compares="branches", kl=kl, advantage={"name": "group", "normalize": False})
        update = PolicyGradientUpdate(of_config, EntropyWeight.of(of_config.entropy))
        batch = update.prepare(groups(branched, (0, 2)), 1)
        assert batch.penalty is not None
        places = batch.penalty.estimate([1.0, 2.0, 0.5, 0.0, 0.0])
        found = {(p.store, p.row): p.advantage for p in places}
        left = (0.75 - 0.1, 0.25 - 0.2, 0.0 - 0.05)
        expected = [reward - statistics.mean(left) for reward in left]
        assert [found["store-0", row] for row in range(3)] == pytest.approx(expected)
