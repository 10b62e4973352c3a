"""Losses of pairs, single answers and scores against formulas written out in plain Python floats."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from nemorl.algorithms.objective import sequence_weights
from nemorl.algorithms.offline import Unit, objective_of
from nemorl.algorithms.pair_losses import ScorePairLoss, StepLoss, pair_loss
from nemorl.config.algorithm import AlgorithmConfig, KtoConfig, PreferenceConfig
from nemorl.config.algorithm.offline import BradleyTerryLossConfig, LogExpLossConfig
from nemorl.config.algorithm.pair_losses import PREFERENCE_PRESETS, LogisticLossConfig, PairLossConfig
from nemorl.data.examples import Example
from nemorl.data.packed import Compared, PackedBatch, with_compared

BETA = 0.3
# The sequences of two pairs: neither in the order of their units nor chosen first.
LENGTHS = [4, 6, 3, 5]
PROMPTS = [1, 3, 1, 2]
UNITS = [7, 2, 2, 7]
LABELS = [-1.0, 1.0, -1.0, 1.0]
MARGINS = [0.5, 2.0, 2.0, 0.5]
PAIRS = [(1, 2), (3, 0)]  # places of chosen and rejected, by unit


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


# The loss of one pair, from chosen, rejected and the margin, for every preset's settings with beta BETA.
BY_HAND = {
    "dpo": lambda c, r, m: -math.log(sigmoid(BETA * (c - r))),
    "cdpo": lambda c, r, m: (
        -0.9 * math.log(sigmoid(BETA * (c - r))) - 0.1 * math.log(sigmoid(BETA * (r - c)))
    ),
    "robust_dpo": lambda c, r, m: (
        (-0.9 * math.log(sigmoid(BETA * (c - r))) + 0.1 * math.log(sigmoid(BETA * (r - c)))) / 0.8
    ),
    "ipo": lambda c, r, m: (c - r - 1 / (2 * BETA)) ** 2,
    "hinge": lambda c, r, m: max(0.0, 1 - BETA * (c - r)),
    "slic": lambda c, r, m: max(0.0, 1 - BETA * (c - r)),
    "simpo": lambda c, r, m: -math.log(sigmoid(BETA * (c - r) - 1.0)),
    "cpo": lambda c, r, m: -math.log(sigmoid(BETA * (c - r))),
    "orpo": lambda c, r, m: -BETA * math.log(sigmoid(log_odds(c) - log_odds(r))),
    "apo_zero": lambda c, r, m: 1 - sigmoid(BETA * c) + sigmoid(BETA * r),
    "apo_down": lambda c, r, m: sigmoid(BETA * c) + 1 - sigmoid(BETA * (c - r)),
}
SFT = {"slic": 0.1, "cpo": 1.0, "orpo": 1.0}
MEANS = {"ipo", "simpo", "orpo"}
NO_REFERENCE = {"slic", "simpo", "cpo", "orpo"}


def config_of(name: str, **loss: object) -> PreferenceConfig:
    section = {"name": name, "num_steps": 1, "batch_size": 2, "loss": {"beta": BETA, **loss}}
    return TypeAdapter(AlgorithmConfig).validate_python(section)


def batch_of(seed: int = 0, *, reference: bool = True, label_tokens: bool = False) -> PackedBatch:
    """Four ragged sequences whose prompts are not learned, in float64."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(LENGTHS, PROMPTS, strict=True)])
    size = sum(LENGTHS)
    chosen = sum(n - p for n, p, label in zip(LENGTHS, PROMPTS, LABELS, strict=True) if label > 0)
    batch = PackedBatch(
        tokens=torch.randint(0, 9, (size,), generator=g),
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32),
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS]),
        loss_mask=mask,
        weights=mask.double() / chosen,
        labels=torch.where(torch.rand(size, generator=g) < 0.5, 1.0, -1.0) * mask if label_tokens else None,
    )
    compared = [Compared(*row) for row in zip(UNITS, LABELS, MARGINS, strict=True)]
    batch = with_compared(batch, compared)
    if reference:
        batch = replace(batch, reference_logprobs=(-torch.rand(size, generator=g).double() - 0.2) * mask)
    return batch


def logprobs_of(batch: PackedBatch, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    # Not zero outside the mask: a loss must not look there.
    return (-torch.rand(batch.num_tokens, generator=g).double() - 0.1).requires_grad_()


def answers(values: Sequence[float], *, mean: bool) -> list[float]:
    """Sum or mean over each answer, one token at a time."""
    found, start = [], 0
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        trained = [values[i] for i in range(start + prompt, start + length)]
        found.append(sum(trained) / (len(trained) if mean else 1))
        start += length
    return found


def differences(formula: Callable[[list[float]], float], at: torch.Tensor) -> list[float]:
    """Central differences of a written-out loss at every token."""
    found = []
    for token in range(at.numel()):
        up, down = at.tolist(), at.tolist()
        up[token] += 1e-5
        down[token] -= 1e-5
        found.append((formula(up) - formula(down)) / 2e-5)
    return found


def relative_by_hand(values: Sequence[float], batch: PackedBatch, *, mean: bool) -> list[float]:
    """Of each answer its logprob, less the reference's where there is one."""
    policy = answers(values, mean=mean)
    if batch.reference_logprobs is None:
        return policy
    reference = answers(batch.reference_logprobs.tolist(), mean=mean)
    return [p - r for p, r in zip(policy, reference, strict=True)]


def sft_by_hand(values: Sequence[float]) -> float:
    sums = answers(values, mean=False)
    return -(sums[1] + sums[3]) / 6


def preference_by_hand(name: str, values: Sequence[float], batch: PackedBatch) -> float:
    """The whole loss of a preset."""
    relative = relative_by_hand(values, batch, mean=name in MEANS)
    pairs = sum(BY_HAND[name](relative[c], relative[r], MARGINS[c]) for c, r in PAIRS) / 2
    return pairs + SFT.get(name, 0.0) * sft_by_hand(values)


@pytest.mark.parametrize("name", PREFERENCE_PRESETS)
def test_every_preset_is_its_formula(name):
    config, batch = config_of(name), batch_of(reference=name not in NO_REFERENCE)
    logprobs = logprobs_of(batch)
    output = objective_of(config).loss(2, 0.0)(batch, logprobs, None)

    values = logprobs.tolist()
    assert output.loss.item() == pytest.approx(preference_by_hand(name, values, batch), rel=1e-6)
    metrics = objective_of(config).metrics({k: float(v) for k, v in output.sums.items()}, {})
    policy = answers(values, mean=name in MEANS)
    relative = relative_by_hand(values, batch, mean=name in MEANS)
    assert metrics["rewards/margin"] == pytest.approx(
        BETA * sum(relative[c] - relative[r] for c, r in PAIRS) / 2, rel=1e-5
    )
    assert metrics["rewards/accuracy"] == sum(relative[c] > relative[r] for c, r in PAIRS) / 2
    assert metrics["loss/sft"] == pytest.approx(sft_by_hand(values), rel=1e-5)
    assert metrics["logprobs/chosen"] == pytest.approx((policy[1] + policy[3]) / 2, rel=1e-5)


@pytest.mark.parametrize("name", PREFERENCE_PRESETS)
def test_gradients_are_those_of_the_formula(name):
    config, batch = config_of(name), batch_of(reference=name not in NO_REFERENCE)
    logprobs = logprobs_of(batch)
    (grad,) = torch.autograd.grad(objective_of(config).loss(2, 0.0)(batch, logprobs, None).loss, logprobs)
    expected = differences(lambda values: preference_by_hand(name, values, batch), logprobs)
    assert grad.tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(grad != 0, batch.loss_mask & (grad != 0))  # prompts teach nothing


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_cross_entropy_is_a_mean_over_tokens_or_over_answers(aggregation: str) -> None:
    """OpenRLHF and NeMo-RL take the mean over answers: of their means, or (NeMo-RL's default) their sums."""
    section = {"name": "dpo", "num_steps": 1, "batch_size": 2, "sft_coefficient": 0.5}
    config: PreferenceConfig = TypeAdapter(AlgorithmConfig).validate_python(
        section | {"sft_aggregation": aggregation}
    )
    objective, batch = objective_of(config), batch_of()
    chosen = [n - p if label > 0 else 0 for n, p, label in zip(LENGTHS, PROMPTS, LABELS, strict=True)]
    weights = sequence_weights(chosen, objective.aggregation).double()
    batch = replace(batch, weights=weights.repeat_interleave(torch.tensor(LENGTHS)) * batch.loss_mask)
    logprobs = logprobs_of(batch)
    output = objective.loss(2, 0.0)(batch, logprobs, None)

    of_answers = answers(logprobs.tolist(), mean=aggregation == "seq-mean-token-mean")
    divisor = 6 if aggregation == "token-mean" else 2  # tokens of the chosen answers, or answers
    expected = -(of_answers[1] + of_answers[3]) / divisor
    assert float(output.sums["loss/sft"]) == pytest.approx(expected, rel=1e-6)
    rest = float(output.sums["loss/total"] - output.sums["loss/preference"])
    assert rest == pytest.approx(0.5 * expected, rel=1e-6)


def test_pairs_may_lie_in_any_micro_batch_but_not_apart():
    batch, logprobs = batch_of(), logprobs_of(batch_of())
    loss = objective_of(config_of("dpo")).loss(2, 0.0)
    whole = loss(batch, logprobs, None).loss
    parts = []
    for sequences in ([0, 3], [2, 1]):
        mine = replace(batch, advantages=logprobs.detach()).select(sequences)
        parts.append(loss(mine, mine.advantages, None).loss)
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-12)
    torn = batch.select([0, 1])
    with pytest.raises(ValueError, match="a pair was split"):
        loss(torn, logprobs[: torn.num_tokens], None)


def test_a_micro_batch_without_pairs_costs_nothing_and_has_a_gradient():
    batch = with_compared(replace(batch_of(), units=None, labels=None), [Compared(n) for n in range(4)])
    logprobs = logprobs_of(batch)
    output = objective_of(config_of("dpo")).loss(2, 0.0)(batch, logprobs, None)
    assert output.loss.item() == 0
    assert output.loss.requires_grad
    assert output.sums["pairs"] == 0


def test_margins_of_the_data_raise_the_bar():
    config = LogisticLossConfig(beta=BETA, gamma=0.2, margin_scale=0.5)
    chosen, rejected, margins = torch.tensor([1.0]), torch.tensor([0.4]), torch.tensor([3.0])
    expected = -math.log(sigmoid(BETA * 0.6 - 0.2 - 0.5 * 3))
    assert pair_loss(chosen, rejected, margins, config).item() == pytest.approx(expected)


def test_ipo_has_both_conventions():
    batch = batch_of()
    logprobs = logprobs_of(batch)
    for form in ("sum", "mean"):
        loss = objective_of(config_of("ipo", logprobs=form)).loss(2, 0.0)(batch, logprobs, None).loss
        policy = answers(logprobs.tolist(), mean=form == "mean")
        reference = answers(batch.reference_logprobs.tolist(), mean=form == "mean")
        x = [p - r for p, r in zip(policy, reference, strict=True)]
        assert loss.item() == pytest.approx(
            sum((x[c] - x[r] - 1 / (2 * BETA)) ** 2 for c, r in PAIRS) / 2, rel=1e-6
        )


def test_a_certain_answer_has_finite_odds():
    config: PairLossConfig = config_of("orpo").loss
    sure = torch.zeros(1, requires_grad=True)
    loss = pair_loss(sure, torch.tensor([-1.0]), torch.zeros(1), config)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(torch.autograd.grad(loss.sum(), sure)[0]).all()


def test_reference_sums_serve_as_well_as_tokens():
    batch = batch_of()
    logprobs = logprobs_of(batch)
    sums = answers(batch.reference_logprobs.tolist(), mean=False)
    compared = [Compared(*row) for row in zip(UNITS, LABELS, MARGINS, sums, strict=True)]
    cached = with_compared(replace(batch, reference_logprobs=None), compared)
    for name in ("dpo", "ipo", "apo_zero"):
        loss = objective_of(config_of(name)).loss(2, 0.0)
        assert loss(cached, logprobs, None).loss.item() == pytest.approx(
            loss(batch, logprobs, None).loss.item(), rel=1e-6
        )


@pytest.mark.parametrize("divergence", [0.7, -2.0], ids=["apart", "negative counts as none"])
def test_kto_is_its_formula(divergence):
    config = KtoConfig(
        name="kto", num_steps=1, batch_size=4, beta=BETA, desirable_weight=1.5, undesirable_weight=0.5
    )
    batch, logprobs = batch_of(), logprobs_of(batch_of())
    output = objective_of(config).loss(4, divergence)(batch, logprobs, None)
    z = max(divergence, 0)

    def by_hand(values: list[float]) -> float:
        cost = 0.0
        for x, label in zip(relative_by_hand(values, batch, mean=False), LABELS, strict=True):
            cost += 1.5 * (1 - sigmoid(BETA * (x - z))) if label > 0 else 0.5 * (1 - sigmoid(BETA * (z - x)))
        return cost / 4

    assert output.loss.item() == pytest.approx(by_hand(logprobs.tolist()), rel=1e-6)
    (grad,) = torch.autograd.grad(output.loss, logprobs)
    assert grad.tolist() == pytest.approx(differences(by_hand, logprobs), abs=1e-6)
    assert torch.equal(grad != 0, batch.loss_mask)
    relative = relative_by_hand(logprobs.tolist(), batch, mean=False)
    metrics = objective_of(config).metrics({k: float(v) for k, v in output.sums.items()}, {})
    good = [x for x, label in zip(relative, LABELS, strict=True) if label > 0]
    bad = [x for x, label in zip(relative, LABELS, strict=True) if label < 0]
    assert metrics["rewards/desirable"] == pytest.approx(BETA * sum(good) / 2, rel=1e-5)
    assert metrics["rewards/undesirable"] == pytest.approx(BETA * sum(bad) / 2, rel=1e-5)
    right = sum(x > z for x in good) + sum(x < z for x in bad)
    assert metrics["rewards/accuracy"] == right / 4


def test_kto_contrasts_each_prompt_with_the_answer_to_the_next():
    def unit(*tokens: int) -> Unit:
        return Unit((Example(np.array(tokens, dtype=np.int32), np.arange(len(tokens)) >= 1),), (1.0,))

    contrast = objective_of(KtoConfig(name="kto", num_steps=1, batch_size=2)).contrast(
        [unit(1, 2), unit(3, 4, 5)]
    )
    assert [example.tokens.tolist() for example in contrast] == [[1, 4, 5], [3, 2]]


@pytest.mark.parametrize("form", ["bradley_terry", "log_exp"])
def test_scores_of_pairs_are_their_formula(form):
    if form == "log_exp":
        config, margin = LogExpLossConfig(name="log_exp", center_coefficient=0.05), 0.0
    else:
        config, margin = BradleyTerryLossConfig(margin_scale=0.4, center_coefficient=0.05), 0.4
    batch = batch_of(reference=False)
    values = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3)).double()
    values.requires_grad_()
    output = ScorePairLoss(config, 2)(batch, values, None)

    def ends_of(values: list[float]) -> list[float]:
        return [values[sum(LENGTHS[: i + 1]) - 1] for i in range(4)]

    def by_hand(values: list[float]) -> float:
        ends = ends_of(values)
        costs = (
            math.log(1 + math.exp(ends[r] - ends[c] + margin * MARGINS[c])) + 0.05 * (ends[c] + ends[r]) ** 2
            for c, r in PAIRS
        )
        return sum(costs) / 2

    ends = ends_of(values.tolist())
    assert output.loss.item() == pytest.approx(by_hand(values.tolist()), rel=1e-6)
    (grad,) = torch.autograd.grad(output.loss, values)
    assert grad.tolist() == pytest.approx(differences(by_hand, values), abs=1e-6)
    assert grad.nonzero().flatten().tolist() == [3, 9, 12, 17]  # the last token of each answer alone
    config = TypeAdapter(AlgorithmConfig).validate_python(
        {"name": "reward_model", "num_steps": 1, "batch_size": 2}
    )
    metrics = objective_of(config).metrics({k: float(v) for k, v in output.sums.items()}, {})
    assert metrics["accuracy"] == sum(ends[c] > ends[r] for c, r in PAIRS) / 2


@pytest.mark.parametrize("config", [BradleyTerryLossConfig(), LogExpLossConfig(name="log_exp")])
def test_a_fresh_head_whose_scores_are_all_0_learns(config):
    batch = batch_of(reference=False)
    values = torch.zeros(batch.num_tokens, requires_grad=True)
    (grad,) = torch.autograd.grad(ScorePairLoss(config, 2)(batch, values, None).loss, values)
    assert grad[[3, 9, 12, 17]].abs().tolist() == [0.25] * 4  # half of a pair's share


def test_scores_that_are_far_apart_do_not_overflow():
    batch = batch_of(reference=False)
    for sign in (-1.0, 1.0):
        values = torch.full((batch.num_tokens,), 0.0)
        values[9], values[12] = 1000 * sign, -1000 * sign
        loss = ScorePairLoss(LogExpLossConfig(name="log_exp"), 2)(batch, values, None).loss
        assert loss.item() == pytest.approx((math.log(2) + (2000 if sign < 0 else 0)) / 2)


@pytest.mark.parametrize("sure", [1.0, 0.4], ids=["right or wrong", "as likely as labels say"])
def test_steps_are_cross_entropy(sure):
    batch = batch_of(reference=False, label_tokens=True)
    batch = replace(batch, labels=batch.labels * sure)
    values = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3)).double()
    values.requires_grad_()
    output = StepLoss()(batch, values, None)

    def by_hand(values: list[float]) -> float:
        cost = 0.0
        rows = (values, batch.labels.tolist(), batch.weights.tolist(), batch.loss_mask.tolist())
        for value, label, weight, trained in zip(*rows, strict=True):
            right = (1 + label) / 2
            if trained:
                cost -= weight * (right * math.log(sigmoid(value)) + (1 - right) * math.log(sigmoid(-value)))
        return cost

    assert output.loss.item() == pytest.approx(by_hand(values.tolist()), rel=1e-6)
    (grad,) = torch.autograd.grad(output.loss, values)
    assert grad.tolist() == pytest.approx(differences(by_hand, values), abs=1e-6)
    marked = batch.labels != 0
    assert torch.equal(marked, batch.loss_mask)
    told = ((values > 0) == (batch.labels > 0))[marked]
    assert output.sums["accuracy"] == told.sum()
    assert output.sums["compared"] == marked.sum()
