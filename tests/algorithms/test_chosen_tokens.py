"""Policy losses of some tokens only, and besides the likelihood of good samples, by formulas in floats."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nemorl.algorithms.policy_losses import PolicyLoss, least_entropy
from nemorl.config.algorithm import KLConfig
from nemorl.config.algorithm.losses import ClipLossConfig, ReinforceLossConfig
from nemorl.data.packed import PackedBatch, with_likelihood
from tests.algorithms.packed import MASKS, current, ragged

KL, BONUS = KLConfig(coefficient=0.05, estimator="k2"), 0.01


def with_entropies(seed: int) -> PackedBatch:
    batch = ragged(seed)
    drawn = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(seed + 1))
    return replace(batch, old_entropies=torch.where(batch.loss_mask, drawn, torch.full_like(drawn, 9.0)))


def alone(values: Tensor) -> Tensor:
    """Of the only rank."""
    return values


def test_only_the_tokens_of_the_highest_entropy_have_a_policy_loss() -> None:
    """Divergence and entropy count everywhere, and so does every token among those that divide the sum."""
    batch, quantile = with_entropies(3), 0.4
    assert batch.advantages is not None
    assert batch.old_logprobs is not None
    assert batch.reference_logprobs is not None
    assert batch.old_entropies is not None
    logprobs, entropy = current(batch, 5).requires_grad_(), torch.full((batch.num_tokens,), 0.5)
    config = ClipLossConfig(top_entropy_quantile=quantile)
    loss = PolicyLoss(config, KL, entropy_coefficient=BONUS).prepared(batch, alone)
    found = loss(batch, logprobs, entropy)

    places = [i for i in range(batch.num_tokens) if batch.loss_mask[i]]
    count = 1 + math.floor(quantile * (len(places) - 1))
    highest = sorted(places, key=lambda i: -float(batch.old_entropies[i]))[:count]  # type: ignore[index]
    assert 1 < count < len(places)
    total, policy, gradient = 0.0, 0.0, [0.0] * batch.num_tokens
    for i in places:
        logprob, old = float(logprobs.detach()[i].double()), float(batch.old_logprobs[i].double())
        apart = logprob - float(batch.reference_logprobs[i].double())
        advantage, ratio = float(batch.advantages[i].double()), math.exp(logprob - old)
        clipped = min(max(ratio, 0.8), 1.2)
        term, slope = -min(ratio * advantage, clipped * advantage), 0.0
        if i in highest:
            policy += term / len(places)
            slope = -ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
        total += ((i in highest) * term + 0.05 * apart**2 / 2 - BONUS * 0.5) / len(places)
        gradient[i] = (slope + 0.05 * apart) / len(places)
    assert float(found.loss) == pytest.approx(total, rel=1e-5)
    assert float(found.sums["loss/policy"]) == pytest.approx(policy, rel=1e-5)
    assert float(found.sums["top_entropy_fraction"]) == count
    (slopes,) = torch.autograd.grad(found.loss, logprobs)
    assert slopes.tolist() == pytest.approx(gradient, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("quantile", [0.05, 0.2, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_the_border_is_the_quantile_of_all_ranks(quantile: float, count: int) -> None:
    """Tokens at or above torch's quantile, which TRL takes, are the same."""
    entropies = torch.randn(count, generator=torch.Generator().manual_seed(count)).exp()
    mask = torch.tensor([False, *[True] * count])
    batch = replace(
        ragged(0), loss_mask=mask, old_entropies=torch.cat((torch.tensor([99.0]), entropies))
    )  # of which only these two are looked at
    border = least_entropy(batch, quantile, alone)
    assert (entropies >= border).tolist() == (entropies >= entropies.quantile(1 - quantile)).tolist()
    half = replace(batch, loss_mask=mask & (torch.arange(count + 1) % 2 == 0))
    assert least_entropy(half, quantile, lambda _: entropies) == border


def test_a_part_of_an_update_without_sampled_tokens_has_no_border() -> None:
    batch = replace(with_entropies(0), loss_mask=torch.zeros(ragged(0).num_tokens, dtype=torch.bool))
    assert least_entropy(batch, 0.2, alone) == 0.0


def test_the_likelihood_of_good_samples_is_added() -> None:
    """`coefficient / tokens of the imitated` times the sum of their negative logprobs."""
    batch = ragged(4)
    tokens = sum(MASKS[0]) + sum(MASKS[2])
    batch = with_likelihood(batch, [1 / tokens, 0.0, 1 / tokens, 0.0])
    logprobs, entropy = current(batch, 6).requires_grad_(), torch.zeros(batch.num_tokens)
    plain = PolicyLoss(ReinforceLossConfig(name="reinforce"))
    found = replace(plain, likelihood_coefficient=0.1)(batch, logprobs, entropy)
    bounds = batch.cu_seqlens.tolist()
    imitated = [i for s in (0, 2) for i in range(bounds[s], bounds[s + 1]) if batch.loss_mask[i]]
    nll = -sum(float(logprobs.detach()[i].double()) for i in imitated) / tokens
    without = plain(batch, logprobs, entropy)
    assert float(found.sums["loss/likelihood"]) == pytest.approx(nll, rel=1e-6)
    assert float(found.loss) == pytest.approx(float(without.loss) + 0.1 * nll, rel=1e-6)
    assert found.sums["loss/total"] == found.loss
    assert found.sums["loss/policy"] == without.sums["loss/policy"]
    (more,) = torch.autograd.grad(found.loss - without.loss, logprobs)
    expected = [-0.1 / tokens * (i in imitated) for i in range(batch.num_tokens)]
    assert more.tolist() == pytest.approx(expected, abs=1e-7)
