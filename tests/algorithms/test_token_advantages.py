"""Advantages of tokens against loops written from the formulas, sequence by sequence, in float64."""

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor

from nemorl.algorithms.token_advantages import SequenceKL, TokenEstimator, length_adaptive_lambda, whiten
from nemorl.config.algorithm import (
    CorrectionConfig,
    KLConfig,
    MaskedCorrectionConfig,
    NoCorrectionConfig,
    SequenceMaskConfig,
    TruncatedCorrectionConfig,
)
from nemorl.config.algorithm.advantages import (
    BiLevelGaeConfig,
    GaeConfig,
    OptimalTokenBaselineConfig,
    TokenReturnsConfig,
    TurnGaeConfig,
)
from nemorl.data.packed import PackedBatch

# Lengths of prompt, turn, observation, turn ... of each sequence: several turns, one, one token, none at all.
SEQUENCES = ((3, 4, 2, 3, 1, 5), (2, 6), (4, 1), (1,), (5, 2, 3, 1))
KL = KLConfig(coefficient=0.3, estimator="k1", placement="reward")


def batch_of(sequences: tuple[tuple[int, ...], ...] = SEQUENCES, seed: int = 0) -> PackedBatch:
    """A batch with values and logprobs everywhere, and rewards at the ends of turns."""
    torch.manual_seed(seed)
    turns, starts = [], [0]
    for parts in sequences:
        row = [number // 2 if number % 2 else -1 for number, size in enumerate(parts) for _ in range(size)]
        turns += row
        starts.append(len(turns))
    of_token = torch.tensor(turns)
    mask = of_token >= 0
    ends = mask & (of_token != torch.cat((of_token[1:], torch.tensor([-1]))))
    size = len(turns)
    return PackedBatch(
        tokens=torch.zeros(size, dtype=torch.long),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        position_ids=torch.zeros(size, dtype=torch.long),
        loss_mask=mask,
        weights=mask.float(),
        values=torch.randn(size),
        turns=of_token,
        rewards=torch.randn(size) * ends,
        old_logprobs=-torch.rand(size) * mask,
        reference_logprobs=-torch.rand(size) * mask,
    )


def sampled(batch: PackedBatch) -> list[list[int]]:
    """Places of the sampled tokens of each sequence."""
    return [
        [i for i in range(start, end) if batch.loss_mask[i]]
        for start, end in itertools.pairwise(batch.cu_seqlens.tolist())
    ]


def penalty(batch: PackedBatch, i: int, weight: float) -> float:
    """What the divergence takes at a token, by k1."""
    return weight * (batch.old_logprobs[i].item() - batch.reference_logprobs[i].item())


def lambda_return_advantages(
    batch: PackedBatch, gamma: float, lam: Callable[[int], float], kl: float = 0.0
) -> list[float]:
    """GAE as the weighted mean of n-step advantages, not by its recursion."""
    found = [0.0] * batch.num_tokens
    for places in sampled(batch):
        count, weight = len(places), lam(len(places))
        value = [batch.values[i - 1].item() for i in places] + [0.0]
        reward = [batch.rewards[i].item() - penalty(batch, i, kl) for i in places]
        for t in range(count):
            steps = range(1, count - t + 1)
            ahead = [
                sum(gamma**n * reward[t + n] for n in range(k)) + gamma**k * value[t + k] - value[t]
                for k in steps
            ]
            weights = [(1 - weight) * weight ** (k - 1) for k in steps]
            weights[-1] = weight ** (count - t - 1)  # all longer ones are the last
            found[places[t]] = sum(w * a for w, a in zip(weights, ahead, strict=True))
    return found


def one_rank(values: Tensor) -> Tensor:
    return values


def estimate(config, batch, kl=None):
    return TokenEstimator(config, kl)(batch, one_rank)


@pytest.mark.parametrize("kl", [None, KL], ids=["plain", "less-divergence"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (1.0, 0.0)])
def test_gae_is_the_mean_of_n_step_advantages(gamma, lam, kl):
    batch = batch_of()
    found = estimate(GaeConfig(name="gae", gamma=gamma, lam=lam, whiten=False), batch, kl)
    expected = lambda_return_advantages(batch, gamma, lambda _: lam, 0.3 if kl else 0.0)
    torch.testing.assert_close(found.advantages, torch.tensor(expected), atol=1e-6, rtol=1e-5)
    before = torch.tensor([batch.values[i - 1] if batch.loss_mask[i] else 0.0 for i in range(len(expected))])
    torch.testing.assert_close(found.returns, found.advantages + before, atol=1e-6, rtol=1e-5)


def test_critic_and_policy_may_have_a_lambda_each_and_the_policys_grow_with_the_length():
    batch = batch_of()
    config = GaeConfig(name="gae", length_adaptive_alpha=0.4, critic_lam=1.0, whiten=False)
    found = estimate(config, batch)
    adaptive = lambda_return_advantages(batch, 1.0, lambda count: max(0.0, 1 - 1 / (0.4 * max(count, 1))))
    torch.testing.assert_close(found.advantages, torch.tensor(adaptive), atol=1e-6, rtol=1e-5)
    for places in sampled(batch):
        for t, i in enumerate(places):  # with lambda 1 the critic learns what came
            to_come = sum(batch.rewards[j].item() for j in places[t:])
            assert found.returns[i].item() == pytest.approx(to_come, abs=1e-6)
    lambdas = length_adaptive_lambda(torch.tensor([0, 5, 100, 4000]), 0.05).squeeze(1)
    assert lambdas.tolist() == pytest.approx([0.0, 0.0, 0.8, 0.995])
    assert length_adaptive_lambda(torch.tensor([1, 2]), 2.0).tolist() == [[0.5], [0.75]]


def test_the_critic_learns_rewards_less_the_divergence():
    batch = batch_of()
    config = GaeConfig(name="gae", critic_lam=1.0, whiten=False)
    found = estimate(config, batch, KL)
    for places in sampled(batch):
        for t, i in enumerate(places):
            to_come = sum(batch.rewards[j].item() - penalty(batch, j, 0.3) for j in places[t:])
            assert found.returns[i].item() == pytest.approx(to_come, abs=1e-6)


def test_two_tokens_are_whitened_and_one_is_not():
    advantages = torch.tensor([0.0, 2.0, 9.0])
    found = whiten(advantages, torch.tensor([True, True, False]), one_rank)
    torch.testing.assert_close(found, torch.tensor([-math.sqrt(0.5), math.sqrt(0.5), 0.0]))
    biased = whiten(advantages, torch.tensor([True, True, False]), one_rank, "biased")
    torch.testing.assert_close(biased, torch.tensor([-1.0, 1.0, 0.0]))
    assert whiten(advantages, torch.tensor([False, True, False]), one_rank).tolist() == [0.0, 0.0, 0.0]


def test_metrics_of_a_single_token():
    batch = batch_of(((2, 1),))
    config = TokenReturnsConfig(name="token_returns", whiten=False)
    metrics = estimate(config, batch, KL).metrics
    taken = penalty(batch, 2, 0.3)
    assert metrics == {
        "advantage/mean": pytest.approx(batch.rewards[2].item() - taken, abs=1e-6),
        "advantage/std": pytest.approx(0.0, abs=1e-3),
        "kl/penalty": pytest.approx(taken, abs=1e-6),
    }


def test_turns_as_actions():
    batch = batch_of()
    gamma, lam = 0.9, 0.8
    found = estimate(TurnGaeConfig(name="turn_gae", gamma=gamma, lam=lam, whiten=False), batch, KL)
    for places in sampled(batch):
        turns = [list(run) for _, run in itertools.groupby(places, lambda i: batch.turns[i].item())]
        value = [batch.values[turn[0] - 1].item() for turn in turns] + [0.0]
        paid = [sum(batch.rewards[i].item() - penalty(batch, i, 0.3) for i in turn) for turn in turns]
        advantage = 0.0
        for k in reversed(range(len(turns))):
            advantage = paid[k] + gamma * value[k + 1] - value[k] + gamma * lam * advantage
            for i in turns[k]:
                assert found.advantages[i].item() == pytest.approx(advantage, abs=1e-6)
                assert found.returns[i].item() == pytest.approx(advantage + value[k], abs=1e-6)


def test_turns_first_and_then_their_tokens():
    batch = batch_of()
    config = BiLevelGaeConfig(
        name="bi_level_gae", gamma=0.97, lam=0.9, turn_gamma=0.8, turn_lam=0.7, whiten=False
    )
    found = estimate(config, batch, KL)
    for places in sampled(batch):
        turns = [list(run) for _, run in itertools.groupby(places, lambda i: batch.turns[i].item())]
        value = [batch.values[turn[-1] - 1].item() for turn in turns] + [0.0]
        of_turn = 0.0
        for k in reversed(range(len(turns))):
            paid = batch.rewards[turns[k][-1]].item()
            of_turn = paid + 0.8 * value[k + 1] - value[k] + 0.8 * 0.7 * of_turn
            *before, last = turns[k]
            later, i_later = of_turn - penalty(batch, last, 0.3), last
            assert found.advantages[last].item() == pytest.approx(later, abs=1e-6)
            for i in reversed(before):
                delta = 0.97 * batch.values[i_later - 1].item() - batch.values[i - 1].item()
                later, i_later = delta - penalty(batch, i, 0.3) + 0.97 * 0.9 * later, i
                assert found.advantages[i].item() == pytest.approx(later, abs=1e-6)
                assert found.returns[i].item() == pytest.approx(later + batch.values[i - 1].item(), abs=1e-6)


def test_one_turn_has_the_advantages_of_plain_gae():
    """With one turn both levels are GAE over its tokens, where lambda inside is what plain GAE has."""
    batch = batch_of(((3, 5), (2, 4)))
    plain = estimate(GaeConfig(name="gae", gamma=0.9, lam=0.6, whiten=False), batch)
    levels = BiLevelGaeConfig(name="bi_level_gae", gamma=0.9, lam=0.6, whiten=False)
    torch.testing.assert_close(estimate(levels, batch).advantages, plain.advantages)


def test_returns_of_tokens_whitened_over_the_batch():
    batch = batch_of()
    found = estimate(TokenReturnsConfig(name="token_returns", gamma=0.9), batch, KL)
    raw = {}
    for places in sampled(batch):
        for t, i in enumerate(places):
            raw[i] = sum(
                0.9**n * (batch.rewards[j].item() - penalty(batch, j, 0.3)) for n, j in enumerate(places[t:])
            )
    mean = sum(raw.values()) / len(raw)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in raw.values()) / (len(raw) - 1))
    for i in range(batch.num_tokens):
        expected = (raw[i] - mean) / deviation if i in raw else 0.0
        assert found.advantages[i].item() == pytest.approx(expected, abs=1e-5)
    assert found.returns is None
    assert found.metrics["advantage/mean"] == pytest.approx(mean, abs=1e-6)
    assert found.metrics["advantage/std"] == pytest.approx(deviation * math.sqrt(1 - 1 / len(raw)), abs=1e-6)
    taken = sum(penalty(batch, i, 0.3) for i in raw)
    assert found.metrics["kl/penalty"] == pytest.approx(taken / 4, abs=1e-6)  # of four that were sampled


OTB = OptimalTokenBaselineConfig(name="otb")
GROUPS = (0, 1, 1, 0, 0)  # of the sequences: of 12, none and 3 sampled tokens, and of 6 and 1
SAMPLED = (12, 6)  # tokens of the longest of each


def compared_batch(seed: int = 0) -> PackedBatch:
    """The batch in groups, with the engine's logprobs, and collisions that the old logprobs allow."""
    batch = batch_of(seed=seed)
    p = batch.old_logprobs.exp()
    others = (1 - p).square() * torch.rand(batch.num_tokens)
    return replace(
        batch,
        groups=batch.spread(GROUPS, torch.int64),
        logprobs=batch.old_logprobs + 0.3 * torch.randn(batch.num_tokens),
        old_collisions=(p.square() + others) * batch.loss_mask,
    )


def baselines_by_loops(
    batch: PackedBatch, kl: float, weight: Callable[[int], float], kept: Callable[[list[int]], bool]
) -> list[float]:
    """Advantages by verl's formula, token by token: `w_t = 1 - 2 p_t + sum of p^2`."""
    found = [0.0] * batch.num_tokens
    of_sequences = sampled(batch)
    for group in set(GROUPS):
        members = [places for places, g in zip(of_sequences, GROUPS, strict=True) if g == group]
        for places in members:
            for t, i in enumerate(places):
                numerator, denominator, count = 0.0, 0.0, 0
                for other in members:
                    if len(other) <= t or not kept(other):
                        continue
                    energy = sum(
                        weight(j) ** 2
                        * (1 - 2 * math.exp(batch.old_logprobs[j]) + batch.old_collisions[j].item())
                        for j in other[: t + 1]
                    )
                    numerator += energy * returns_of(batch, other, t, kl)
                    denominator += energy
                    count += 1
                baseline = numerator / (denominator + 1e-8) if count > 1 and kept(places) else 0.0
                found[i] = returns_of(batch, places, t, kl) - baseline
    return found


def returns_of(batch: PackedBatch, places: list[int], t: int, kl: float) -> float:
    return sum(batch.rewards[j].item() - penalty(batch, j, kl) for j in places[t:])


@pytest.mark.parametrize("kl", [None, KL], ids=["plain", "less-divergence"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_optimal_baseline_of_each_token(seed, kl):
    batch = compared_batch(seed)
    found = TokenEstimator(OTB, kl, longest=SAMPLED)(batch, one_rank)
    expected = baselines_by_loops(batch, 0.3 if kl else 0.0, lambda _: 1.0, lambda _: True)
    torch.testing.assert_close(found.advantages, torch.tensor(expected), atol=1e-6, rtol=1e-6)
    assert found.returns is None
    # Where only one sequence of the group is left, nothing is compared: the tokens from the fourth on.
    longest = sampled(batch)[0]
    for t, i in enumerate(longest[3:], 3):
        assert found.advantages[i].item() == pytest.approx(
            returns_of(batch, longest, t, 0.3 if kl else 0.0), abs=1e-6
        )


CORRECTIONS: dict[str, tuple[CorrectionConfig, bool]] = {
    "weights of tokens": (TruncatedCorrectionConfig(name="tis", low=0.8, high=1.1), False),
    "what is left out": (
        NoCorrectionConfig(sequence_mask=SequenceMaskConfig(low=0.9, high=1.05), divisor="kept"),
        True,
    ),
    "what has a weight of 0": (MaskedCorrectionConfig(name="mis", high=1.05), False),
}


@pytest.mark.parametrize("case", CORRECTIONS)
def test_the_optimal_baseline_of_corrected_tokens(case):
    """Energies are multiplied by squared weights; what leaves the loss leaves the baseline."""
    correction, leaves = CORRECTIONS[case]
    batch = compared_batch(5)

    def ratio(i: int) -> float:
        return math.exp(batch.old_logprobs[i].item() - batch.logprobs[i].item())

    def weight(i: int) -> float:
        if correction.name == "tis":
            return min(max(ratio(i), 0.8), 1.1)
        return ratio(i) * (ratio(i) <= 1.05) if correction.name == "mis" else 1.0

    def kept(places: list[int]) -> bool:
        mean = math.exp(sum(math.log(ratio(i)) for i in places) / max(len(places), 1))
        return not leaves or 0.9 <= mean <= 1.05

    found = TokenEstimator(OTB, None, correction, SAMPLED)(batch, one_rank)
    expected = baselines_by_loops(batch, 0.0, weight, kept)
    torch.testing.assert_close(found.advantages, torch.tensor(expected), atol=1e-6, rtol=1e-6)
    if leaves:
        assert [kept(places) for places in sampled(batch) if places] == [True, False, False, True]


def test_baselines_of_nearly_certain_tokens_are_between_the_returns_of_their_group():
    """Energies of 1e-8, which rounding of probabilities close to 1 would make negative, and the sum 0."""
    number = 500
    batch = batch_of(((1, 1),) * 2 * number)
    doubt = torch.empty(4 * number, dtype=torch.float64).uniform_(0, 3e-4)
    p = 1 - doubt
    nearly = replace(
        batch,
        groups=batch.spread([place // 2 for place in range(2 * number)], torch.int64),
        old_logprobs=p.log().float(),
        old_collisions=p.square().float(),
    )
    found = TokenEstimator(OTB, None, longest=(1,) * number)(nearly, one_rank).advantages[1::2]
    returns = batch.rewards[1::2]
    largest = returns.view(-1, 2).abs().amax(1).repeat_interleave(2)
    assert ((returns - found).abs() <= largest + 1e-6).all()


@pytest.mark.parametrize(
    "config",
    [
        OTB,
        GaeConfig(name="gae", lam=0.9, length_adaptive_alpha=0.3),
        TurnGaeConfig(name="turn_gae", gamma=0.9),
        BiLevelGaeConfig(name="bi_level_gae", turn_gamma=0.9),
        TokenReturnsConfig(name="token_returns"),
    ],
    ids=lambda config: config.name,
)
@pytest.mark.parametrize("parts", [((0, 2), (1, 3, 4)), ((3,), (0, 1, 2, 4))])
def test_data_parallel_ranks_have_the_advantages_of_one_process(config, parts):
    """Also where a rank has nothing that was sampled."""
    whole = compared_batch()
    alone = TokenEstimator(config, KL, longest=SAMPLED)(whole, one_rank)
    rows = alone.advantages.split(whole.lengths)
    barrier, slots = Barrier(len(parts)), {}

    def rank(number):
        def over_ranks(values):
            slots[number] = values
            barrier.wait()
            total = sum(slots[other] for other in range(len(parts)))
            barrier.wait()
            return total

        return TokenEstimator(config, KL, longest=SAMPLED)(whole.select(list(parts[number])), over_ranks)

    with ThreadPoolExecutor(len(parts)) as ranks:
        found = list(ranks.map(rank, range(len(parts))))
    for part, of_rank in zip(parts, found, strict=True):
        expected = torch.cat([rows[sequence] for sequence in part])
        torch.testing.assert_close(of_rank.advantages, expected, atol=1e-5, rtol=1e-5)
        assert of_rank.metrics == pytest.approx(alone.metrics)


def test_equal_advantages_are_whitened_to_nothing():
    batch = batch_of(((2, 3), (2, 3)))
    equal = replace(batch, values=torch.zeros(10), rewards=torch.zeros(10))
    assert estimate(GaeConfig(name="gae"), equal).advantages.abs().max() == 0


def test_the_divergence_of_sequences():
    batch = batch_of()
    for estimator, k in {
        "k1": lambda x: x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(-x) - 1 + x,
    }.items():
        found = SequenceKL(KLConfig(coefficient=0.3, estimator=estimator, placement="reward"))(batch)
        expected = [
            sum(k(batch.old_logprobs[i].item() - batch.reference_logprobs[i].item()) for i in places)
            for places in sampled(batch)
        ]
        assert found.tolist() == pytest.approx(expected, abs=1e-6)
