"""Every policy loss against the paper's formula in floats, its gradient against difference quotients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.algorithms.policy_losses import PolicyLoss, choose, draws, token_loss
from nemorl.config.algorithm import NoCorrectionConfig
from nemorl.config.algorithm.losses import (
    CispoLossConfig,
    ClipCovLossConfig,
    ClipLossConfig,
    CustomLossConfig,
    DppoLossConfig,
    GmpoLossConfig,
    GspoLossConfig,
    GspoTokenLossConfig,
    KlCovLossConfig,
    PolicyLossConfig,
    ReinforceLossConfig,
    SapoLossConfig,
)
from nemorl.config.schema import variants
from nemorl.data.packed import PackedBatch
from tests.algorithms import losses_by_hand as by_hand
from tests.algorithms.packed import MASKS, by_sequence, current, ragged

BYPASS = NoCorrectionConfig(form="bypass")

# The bounds are narrow against the ratios of `current`, so that all of them are passed by some token.
LOSSES: dict[str, tuple[Any, by_hand.ByHand]] = {
    "clip": (ClipLossConfig(clip_low=0.1, clip_high=0.2), by_hand.clip),
    "clip, dual": (ClipLossConfig(clip_low=0.1, clip_high=0.2, dual_clip=1.2), by_hand.clip),
    "gspo": (GspoLossConfig(name="gspo", clip_low=0.05, clip_high=0.1), by_hand.gspo),
    "gspo_token": (GspoTokenLossConfig(name="gspo_token", clip_low=0.05, clip_high=0.1), by_hand.gspo_token),
    "gmpo": (GmpoLossConfig(name="gmpo", clip_low=0.1, clip_high=0.15), by_hand.gmpo),
    "cispo": (CispoLossConfig(name="cispo", clip_high=0.2), by_hand.cispo),
    "cispo, both": (CispoLossConfig(name="cispo", clip_low=0.1, clip_high=0.2), by_hand.cispo),
    "dppo": (DppoLossConfig(name="dppo", clip_low=0.02, clip_high=0.03, max_ratio=1.1), by_hand.dppo),
    "dppo, kl": (
        DppoLossConfig(name="dppo", divergence="kl", clip_low=0.001, clip_high=0.002),
        by_hand.dppo,
    ),
    "sapo": (SapoLossConfig(name="sapo", temperature_negative=2.0), by_hand.sapo),
    "reinforce": (ReinforceLossConfig(name="reinforce"), by_hand.reinforce),
}
SELECTING = {ClipCovLossConfig, KlCovLossConfig}  # below, as their formulas have all tokens of an update


def test_every_loss_has_a_formula() -> None:
    built_in = set(variants(PolicyLossConfig)) - {CustomLossConfig}
    assert {type(config) for config, _ in LOSSES.values()} == built_in - SELECTING


def written_out(
    formula: by_hand.ByHand, batch: PackedBatch, x: list[list[float]], sg: list[list[float]], config: Any
) -> list[float]:
    """Losses of all sampled tokens."""
    old, advantages = by_sequence(batch, batch.old_logprobs), by_sequence(batch, batch.advantages)  # type: ignore[arg-type]
    return [loss for parts in zip(x, sg, old, advantages, strict=True) for loss in formula(*parts, config)]


def gradient_by_differences(
    formula: by_hand.ByHand, batch: PackedBatch, x: list[list[float]], config: Any
) -> list[float]:
    """Of the weighted sum, for each sampled token."""
    weights = [w for sequence in by_sequence(batch, batch.weights) for w in sequence]

    def total(moved: list[list[float]]) -> float:
        losses = written_out(formula, batch, moved, x, config)
        return sum(w * loss for w, loss in zip(weights, losses, strict=True))

    gradient = []
    for s, sequence in enumerate(x):
        for t in range(len(sequence)):
            up, down = [list(q) for q in x], [list(q) for q in x]
            up[s][t] += 1e-6
            down[s][t] -= 1e-6
            gradient.append((total(up) - total(down)) / 2e-6)
    return gradient


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("per_token", [False, True], ids=["of sequences", "of tokens"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_equal_the_formula(name: str, per_token: bool, seed: int) -> None:
    config, formula = LOSSES[name]
    if name == "gmpo" and per_token:
        pytest.skip("the formula is of one advantage for a sequence")
    batch = ragged(seed, "seq-mean-token-mean", per_token=per_token)
    logprobs = current(batch, seed + 10).requires_grad_()
    found = token_loss(config, batch, logprobs, batch.old_logprobs, batch.advantages)  # type: ignore[arg-type]

    x = by_sequence(batch, logprobs.detach())
    expected = written_out(formula, batch, x, x, config)
    assert found.loss[batch.loss_mask].tolist() == pytest.approx(expected, rel=2e-5)

    (gradient,) = torch.autograd.grad((found.loss * batch.weights).sum(), logprobs)
    assert gradient[~batch.loss_mask].tolist() == pytest.approx([0.0] * int((~batch.loss_mask).sum()))
    numeric = gradient_by_differences(formula, batch, x, config)
    assert gradient[batch.loss_mask].tolist() == pytest.approx(numeric, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "reinforce"])
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    """With old logprobs that are the current ones, all losses push the same way."""
    batch = replace(ragged(3, "seq-mean-token-mean"), old_logprobs=None)
    logprobs = current(ragged(3), 3).requires_grad_()
    output = PolicyLoss(LOSSES[name][0])(batch, logprobs, torch.zeros(batch.num_tokens))
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    torch.testing.assert_close(gradient, -batch.advantages * batch.weights)  # type: ignore[operator]


def test_gspo_is_the_mean_over_sequences_of_the_clipped_objective() -> None:
    """The paper's formula itself, without any token."""
    config = GspoLossConfig(name="gspo", clip_low=0.05, clip_high=0.1)
    batch = ragged(4, config.aggregation)
    logprobs = current(batch, 4)
    found = PolicyLoss(config)(batch, logprobs, torch.zeros(batch.num_tokens))
    x, old = by_sequence(batch, logprobs), by_sequence(batch, batch.old_logprobs)  # type: ignore[arg-type]
    objective = 0.0
    for now, before, advantage in zip(x, old, (1.3, -0.7, -1.1, 0.4), strict=True):
        s = torch.tensor([a - b for a, b in zip(now, before, strict=True)]).double().mean().exp().item()
        objective += min(s * advantage, min(max(s, 0.95), 1.1) * advantage) / len(x)
    assert found.loss.item() == pytest.approx(-objective, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_splitting_into_micro_batches_changes_neither_sums_nor_gradients(name: str) -> None:
    batch = ragged(5, "seq-mean-token-mean")
    loss = PolicyLoss(LOSSES[name][0])
    logprobs = current(batch, 5).requires_grad_()
    entropy = torch.rand(batch.num_tokens)
    assert_same_in_parts(loss, batch, logprobs, entropy, ((2, 0), (3,), (1,)))


def assert_same_in_parts(
    loss: PolicyLoss,
    batch: PackedBatch,
    logprobs: Tensor,
    entropy: Tensor,
    parts: tuple[tuple[int, ...], ...],
) -> None:
    whole = loss(batch, logprobs, entropy)
    (gradient,) = torch.autograd.grad(whole.loss, logprobs)
    starts = batch.cu_seqlens.tolist()
    outputs = []
    for part in parts:
        index = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in part])
        outputs.append(loss(batch.select(list(part)), logprobs[index], entropy[index]))
    (summed,) = torch.autograd.grad(sum(o.loss for o in outputs), logprobs)  # type: ignore[arg-type]
    torch.testing.assert_close(summed, gradient)
    for key, value in whole.sums.items():
        assert sum(o.sums[key].item() for o in outputs) == pytest.approx(value.item(), rel=1e-5, abs=1e-7)
    for key, value in whole.maxima.items():
        assert max(o.maxima[key] for o in outputs) == value


def test_what_is_clipped_is_counted() -> None:
    config = ClipLossConfig(clip_low=0.1, clip_high=0.2, dual_clip=1.25)
    batch = ragged(6)
    logprobs = current(batch, 6, width=0.6)
    output = PolicyLoss(config)(batch, logprobs, torch.zeros(batch.num_tokens))
    low = high = dual = 0
    tokens = zip(
        (logprobs - batch.old_logprobs)[batch.loss_mask].exp().tolist(),  # type: ignore[operator]
        batch.advantages[batch.loss_mask].tolist(),  # type: ignore[index]
        strict=True,
    )
    for ratio, advantage in tokens:
        low += ratio < 0.9 and advantage < 0
        high += ratio > 1.2 and advantage > 0
        dual += ratio > 1.25 and advantage < 0
    assert low, "nothing to count"
    assert high, "nothing to count"
    assert dual, "nothing to count"
    counted = [int(output.sums[f"clip_fraction/{name}"]) for name in ("low", "high", "dual")]
    assert counted == [low, high, dual]


# Losses that choose among all tokens of an update


def alone(values: Tensor) -> Tensor:
    """What one data-parallel rank sees of the others."""
    return values


def test_kl_cov_holds_the_tokens_of_highest_covariance() -> None:
    config = KlCovLossConfig(name="kl_cov", fraction=0.3, coefficient=2.0)
    batch = ragged(7, per_token=True)
    logprobs = current(batch, 7).requires_grad_()
    loss = PolicyLoss(config).prepared(batch, alone)
    found = token_loss(config, batch, logprobs, batch.old_logprobs, batch.advantages, loss.choice)  # type: ignore[arg-type]

    old, advantages = by_sequence(batch, batch.old_logprobs), by_sequence(batch, batch.advantages)  # type: ignore[arg-type]
    covariances = by_hand.Tokens(old, advantages).covariances()
    count = int(0.3 * sum(map(sum, MASKS)))
    border = sorted((c for sequence in covariances for c in sequence), reverse=True)[count - 1]
    held = [[c >= border for c in sequence] for sequence in covariances]
    assert sum(map(sum, held)) == count == 3
    x = by_sequence(batch, logprobs.detach())
    expected = [
        v
        for parts in zip(x, x, old, advantages, held, strict=True)
        for v in by_hand.kl_cov(*parts[:4], config, parts[4])
    ]
    assert found.loss[batch.loss_mask].tolist() == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    ratio = (logprobs - batch.old_logprobs).exp() * batch.loss_mask  # type: ignore[operator]
    pull = 2.0 * torch.sign(logprobs - batch.old_logprobs) * found.metrics["selected_fraction"]  # type: ignore[operator]
    torch.testing.assert_close(gradient, (-ratio * batch.advantages + pull) * batch.loss_mask)  # type: ignore[operator]


def test_clip_cov_leaves_out_tokens_within_its_bounds() -> None:
    config = ClipCovLossConfig(name="clip_cov", fraction=0.2, covariance_low=-0.2, covariance_high=0.9)
    batch = ragged(8, per_token=True)
    logprobs = current(batch, 8).requires_grad_()
    loss = PolicyLoss(config).prepared(batch, alone)
    found = token_loss(config, batch, logprobs, batch.old_logprobs, batch.advantages, loss.choice)  # type: ignore[arg-type]
    out = found.metrics["selected_fraction"]

    old, advantages = by_sequence(batch, batch.old_logprobs), by_sequence(batch, batch.advantages)  # type: ignore[arg-type]
    covariances = [c for s in by_hand.Tokens(old, advantages).covariances() for c in s]
    within = [-0.2 <= c <= 0.9 for c in covariances]
    assert sum(within) > 2, "nothing to draw"
    assert int(out.sum()) == int(0.2 * len(covariances)) == 2
    drawn = sorted(d for d, w in zip(draws(batch)[batch.loss_mask].tolist(), within, strict=True) if w)
    expected = [
        w and d <= drawn[1] for d, w in zip(draws(batch)[batch.loss_mask].tolist(), within, strict=True)
    ]
    assert out[batch.loss_mask].tolist() == expected
    plain = ClipLossConfig(clip_low=config.clip_low, clip_high=config.clip_high)
    ppo = token_loss(plain, batch, logprobs, batch.old_logprobs, batch.advantages)  # type: ignore[arg-type]
    torch.testing.assert_close(found.loss, torch.where(out, torch.zeros(()), ppo.loss))
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert not gradient[out].any()


@pytest.mark.parametrize(
    "config",
    [
        ClipCovLossConfig(name="clip_cov", fraction=0.4, covariance_low=-1.0),
        KlCovLossConfig(name="kl_cov", fraction=0.4),
    ],
    ids=["clip_cov", "kl_cov"],
)
def test_the_choice_is_the_same_in_every_order_over_ranks_and_micro_batches(config: Any) -> None:
    batch = ragged(9, per_token=True)
    whole = choose(batch, batch.old_logprobs, config, alone)  # type: ignore[arg-type]
    assert whole is not None
    parts = [batch.select([2, 1]), batch.select([0, 3])]
    others: list[list[Tensor]] = [[], []]

    def hear(values: Tensor) -> Tensor:
        others[1].append(values)
        return values

    choose(parts[1], parts[1].old_logprobs, config, hear)  # what the second rank says
    said = iter(others[1])
    apart = choose(
        parts[0],
        parts[0].old_logprobs,
        config,
        lambda v: torch.cat([v, next(said)]),  # type: ignore[arg-type]
    )
    assert apart is not None
    assert apart.low == pytest.approx(whole.low, rel=1e-12)
    assert apart.last_draw == whole.last_draw
    chosen = whole.of(batch, batch.old_logprobs, batch.advantages)  # type: ignore[arg-type]
    for part, sequences in zip(parts, ([2, 1], [0, 3]), strict=True):
        here = whole.of(part, part.old_logprobs, part.advantages)  # type: ignore[arg-type]
        marked = replace(batch, weights=chosen.float()).select(sequences).weights
        assert here.tolist() == marked.bool().tolist()
    loss = replace(PolicyLoss(config), choice=whole)
    logprobs = current(batch, 9).requires_grad_()
    assert_same_in_parts(loss, batch, logprobs, torch.rand(batch.num_tokens), ((1, 3), (0,), (2,)))


@pytest.mark.parametrize(
    "config",
    [KlCovLossConfig(name="kl_cov"), ClipCovLossConfig(name="clip_cov", covariance_low=0.0)],
    ids=["kl_cov", "clip_cov"],
)
def test_of_fewer_tokens_than_a_fraction_makes_one_is_chosen(config: Any) -> None:
    """As in the paper's code and in verl; of none, none."""
    batch = ragged(1)
    assert config.fraction * int(batch.loss_mask.sum()) < 1
    choice = PolicyLoss(config).prepared(batch, alone).choice
    assert choice is not None
    chosen = choice.of(batch, batch.old_logprobs, batch.advantages)  # type: ignore[arg-type]
    assert int(chosen.sum()) == 1
    nothing = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert PolicyLoss(config).prepared(nothing, alone).choice is None


def test_equal_advantages_hold_no_token() -> None:
    config = KlCovLossConfig(name="kl_cov", fraction=0.5)
    batch = replace(ragged(1), advantages=torch.zeros(ragged(1).num_tokens))
    choice = choose(batch, batch.old_logprobs, config, alone)  # type: ignore[arg-type]
    assert choice is not None
    assert not choice.of(batch, batch.old_logprobs, batch.advantages).any()  # type: ignore[arg-type]


def test_draws_are_even_and_of_the_tokens_before_alone() -> None:
    lengths = [700, 900, 700]
    tokens = torch.randint(0, 50, (2300,), generator=torch.Generator().manual_seed(0))
    tokens[1600:1650] = tokens[:50]  # the third begins as the first
    batch = PackedBatch(
        tokens=tokens,
        cu_seqlens=torch.tensor([0, 700, 1600, 2300], dtype=torch.int32),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        loss_mask=torch.ones(2300, dtype=torch.bool),
        weights=torch.ones(2300),
    )
    drawn = draws(batch)
    assert drawn[1600:1650].tolist() == drawn[:50].tolist()
    assert not (drawn[1651:] == drawn[51:700]).any()
    assert len(drawn.unique()) == 2300 - 50
    share = drawn.double() / 2.0**64 + 0.5
    for low in (0.0, 0.25, 0.5, 0.75):
        assert int(((share >= low) & (share < low + 0.25)).sum()) == pytest.approx(575, abs=90)
