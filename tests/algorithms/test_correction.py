"""Weights, masks and metrics of the correction, one token at a time in Python floats."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.algorithms.objective import Ages, correct, finish_metrics, mean_weight
from nemorl.algorithms.policy_losses import PolicyLoss
from nemorl.config.algorithm import (
    CorrectionConfig,
    IcePopCorrectionConfig,
    KLConfig,
    MaskedCorrectionConfig,
    NoCorrectionConfig,
    OnlineConfig,
    SequenceMaskConfig,
    TruncatedCorrectionConfig,
)
from nemorl.config.algorithm.losses import (
    ClipLossConfig,
    CustomLossConfig,
    PolicyLossConfig,
    ReinforceLossConfig,
)
from nemorl.config.environment import SingleTurnEnvConfig
from nemorl.config.facts import metric_names
from nemorl.config.schema import names, variants
from nemorl.data.packed import PackedBatch
from tests.algorithms.packed import by_sequence, current, ragged
from tests.algorithms.test_policy_losses import assert_same_in_parts

MASK = SequenceMaskConfig(low=0.85, high=1.15)
LEVELS = ("token", "sequence", "geometric")
KINDS = {
    "tis": lambda level: TruncatedCorrectionConfig(name="tis", level=level, low=0.8, high=1.1),
    "mis": lambda level: MaskedCorrectionConfig(name="mis", level=level, high=1.1),
    "icepop": lambda level: IcePopCorrectionConfig(name="icepop", level=level, low=0.8, high=1.1),
}


def ratios(proximal: list[float], engine: list[float], level: str) -> list[float]:
    """Of the tokens of one sequence: `prod (p / q)`, or its root, or each alone."""
    each = [math.exp(p) / math.exp(q) for p, q in zip(proximal, engine, strict=True)]
    product = math.prod(each)
    return {
        "token": each,
        "sequence": [product] * len(each),
        "geometric": [product ** (1 / len(each))] * len(each),
    }[level]


def weight(ratio: float, kind: str) -> float:
    if kind == "tis":
        return min(max(ratio, 0.8), 1.1)
    out = ratio > 1.1 or (kind == "icepop" and ratio < 0.8)
    return 0.0 if out else ratio


def weights_by_hand(proximal: Tensor, batch: PackedBatch, kind: str, level: str) -> list[float]:
    return [
        weight(ratio, kind)
        for p, q in zip(by_sequence(batch, proximal), by_sequence(batch, batch.logprobs), strict=True)  # type: ignore[arg-type]
        for ratio in ratios(p, q, level)
    ]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_the_formula(kind: str, level: str, seed: int) -> None:
    batch = ragged(seed)
    config = KINDS[kind](level)
    found = correct(batch, current(batch, seed), batch.old_logprobs, config, has_ratio=True)  # type: ignore[arg-type]
    expected = weights_by_hand(batch.old_logprobs, batch, kind, level)  # type: ignore[arg-type]
    assert found.weight[batch.loss_mask].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_decoupled_loss_is_the_weight_times_the_clipped_surrogate(kind: str, level: str) -> None:
    """Three policies: ratio current / old, weight old / engine; masks leave the divisor alone."""
    batch = ragged(2)
    logprobs = current(batch, 2).requires_grad_()
    loss = PolicyLoss(ClipLossConfig(), KLConfig(), KINDS[kind](level))
    output = loss(batch, logprobs, torch.zeros(batch.num_tokens))
    weights = weights_by_hand(batch.old_logprobs, batch, kind, level)  # type: ignore[arg-type]
    now, old, advantages = (
        [v for s in by_sequence(batch, values) for v in s]
        for values in (logprobs.detach(), batch.old_logprobs, batch.advantages)  # type: ignore[arg-type]
    )
    total, slopes = 0.0, []
    for w, p, q, a in zip(weights, now, old, advantages, strict=True):
        r = math.exp(p - q)
        total -= w * min(r * a, min(max(r, 0.8), 1.2) * a)
        slopes.append(-w * r * a if r * a <= min(max(r, 0.8), 1.2) * a else 0.0)
    count = int(batch.loss_mask.sum())
    assert output.loss.item() == pytest.approx(total / count, rel=1e-5)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    assert gradient[batch.loss_mask].tolist() == pytest.approx(
        [s / count for s in slopes], rel=1e-4, abs=1e-7
    )


def test_bypass_takes_the_ratio_against_the_engine() -> None:
    batch = ragged(3)
    logprobs = current(batch, 3)
    bypass = PolicyLoss(ClipLossConfig(), KLConfig(), NoCorrectionConfig(form="bypass"))
    output = bypass(batch, logprobs, torch.zeros(batch.num_tokens))
    total = 0.0
    for p, q, a in zip(
        logprobs[batch.loss_mask].tolist(),
        batch.logprobs[batch.loss_mask].tolist(),  # type: ignore[index]
        batch.advantages[batch.loss_mask].tolist(),  # type: ignore[index]
        strict=True,
    ):
        r = math.exp(p - q)
        total -= min(r * a, min(max(r, 0.8), 1.2) * a)
    assert output.loss.item() == pytest.approx(total / int(batch.loss_mask.sum()), rel=1e-5)


@pytest.mark.parametrize("kind", ["mis", "icepop"])
def test_in_the_bypass_form_a_ratio_is_not_weighed_twice(kind: str) -> None:
    batch = ragged(4)
    logprobs = current(batch, 4)
    config = KINDS[kind]("token").model_copy(update={"form": "bypass"})
    found = correct(batch, logprobs, batch.logprobs, config, has_ratio=True)  # type: ignore[arg-type]
    expected = [float(w > 0) for w in weights_by_hand(logprobs, batch, kind, "token")]
    assert found.weight[batch.loss_mask].tolist() == expected
    assert 0 in expected, "nothing is left out"


def test_a_loss_without_a_ratio_is_weighed_by_current_over_engine_in_the_bypass_form() -> None:
    batch = ragged(5)
    logprobs = current(batch, 5).requires_grad_()
    config = KINDS["tis"]("sequence").model_copy(update={"form": "bypass"})
    output = PolicyLoss(ReinforceLossConfig(name="reinforce"), KLConfig(), config)(
        batch, logprobs, torch.zeros(batch.num_tokens)
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    weights = weights_by_hand(logprobs.detach(), batch, "tis", "sequence")
    expected = [
        -w * a / len(weights)
        for w, a in zip(weights, batch.advantages[batch.loss_mask].tolist(), strict=True)  # type: ignore[index]
    ]
    assert gradient[batch.loss_mask].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("form", ["decoupled", "bypass"])
def test_sequences_are_left_out_by_the_geometric_mean(form: Any) -> None:
    batch = ragged(6)
    logprobs = current(batch, 6)
    config = NoCorrectionConfig(form=form, sequence_mask=MASK)
    old = batch.old_logprobs if form == "decoupled" else batch.logprobs
    found = correct(batch, logprobs, old, config, has_ratio=True)  # type: ignore[arg-type]
    proximal = batch.old_logprobs if form == "decoupled" else logprobs
    expected = [
        0.85 <= ratio <= 1.15
        for p, q in zip(by_sequence(batch, proximal), by_sequence(batch, batch.logprobs), strict=True)  # type: ignore[arg-type]
        for ratio in ratios(p, q, "geometric")
    ]
    assert found.weight[batch.loss_mask].bool().tolist() == expected
    assert 0 < sum(expected) < len(expected), "all or none are left out"


@pytest.mark.parametrize(
    ("mask", "counts"),
    [
        pytest.param(
            {"max_difference": 0.35},
            lambda of_tokens: max(math.log(r) ** 2 / 2 for r in of_tokens) <= 0.35**2 / 2,
            id="verl's seq_max_k2",
        ),
        pytest.param(
            {"max_mean_factor": 1.2},
            lambda of_tokens: sum(math.exp(abs(math.log(r))) for r in of_tokens) / len(of_tokens) <= 1.2,
            id="NeMo-RL's seq_logprob_error_threshold",
        ),
    ],
)
def test_sequences_are_left_out_by_the_ratios_of_their_tokens(
    mask: dict[str, float], counts: Callable[[list[float]], bool]
) -> None:
    batch = ragged(6)
    assert batch.old_logprobs is not None
    assert batch.logprobs is not None
    config = NoCorrectionConfig(sequence_mask=SequenceMaskConfig.model_validate(mask))
    found = correct(batch, current(batch, 6), batch.old_logprobs, config)
    expected: list[bool] = []
    for p, q in zip(by_sequence(batch, batch.old_logprobs), by_sequence(batch, batch.logprobs), strict=True):
        of_tokens = ratios(p, q, "token")
        expected += [counts(of_tokens)] * len(of_tokens)
    assert found is not None
    assert found.weight[batch.loss_mask].bool().tolist() == expected
    assert 0 < sum(expected) < len(expected), "all or none are left out"


def test_off_policy_sequences_of_negative_advantage_are_left_out() -> None:
    """DeepSeek-V3.2's equation 9."""
    batch = ragged(7)
    logprobs = current(batch, 7) - 0.3
    config = NoCorrectionConfig(off_policy_threshold=0.2)
    found = correct(batch, logprobs, batch.old_logprobs, config, has_ratio=True)  # type: ignore[arg-type]
    expected = []
    for now, engine, advantages in zip(
        by_sequence(batch, logprobs),
        by_sequence(batch, batch.logprobs),  # type: ignore[arg-type]
        by_sequence(batch, batch.advantages),  # type: ignore[arg-type]
        strict=True,
    ):
        drift = sum(math.log(math.exp(q) / math.exp(p)) for p, q in zip(now, engine, strict=True)) / len(now)
        expected += [0.0 if a < 0 and drift > 0.2 else 1.0 for a in advantages]
    assert found.weight[batch.loss_mask].tolist() == expected
    assert 0 < sum(expected) < len(expected), "all or none are left out"


CORRECTIONS: list[CorrectionConfig] = [
    KINDS["tis"]("token"),
    KINDS["mis"]("sequence"),
    IcePopCorrectionConfig(
        name="icepop", level="geometric", low=0.9, high=1.1, sequence_mask=MASK, off_policy_threshold=0.1
    ),
    KINDS["icepop"]("token").model_copy(update={"form": "bypass"}),
    KINDS["mis"]("token").model_copy(
        update={"sequence_mask": MASK, "off_policy_threshold": 0.1, "divisor": "kept"}
    ),
    KINDS["tis"]("token").model_copy(update={"normalize": True}),
]


@pytest.mark.parametrize(
    "config", CORRECTIONS, ids=lambda c: f"{c.name}-{c.level}-{c.form}-{c.divisor}-{c.normalize}"
)
def test_micro_batches_change_nothing(config: CorrectionConfig) -> None:
    batch = ragged(8)
    kl = KLConfig(coefficient=0.1, importance_weighted=True)
    loss = PolicyLoss(ClipLossConfig(), kl, config, entropy_coefficient=0.01)
    logprobs = current(batch, 8).requires_grad_()
    loss = loss.prepared(batch, lambda values: values)
    assert_same_in_parts(loss, batch, logprobs, torch.rand(batch.num_tokens), ((3, 0), (1,), (2,)))


def test_metrics_of_a_correction() -> None:
    batch = ragged(9)
    config = TruncatedCorrectionConfig(name="tis", low=0.8, high=1.1)
    output = PolicyLoss(ClipLossConfig(), KLConfig(), config)(
        batch, current(batch, 9), torch.zeros(batch.num_tokens)
    )
    metrics = finish_metrics(
        {k: v.item() for k, v in output.sums.items()}, {k: v.item() for k, v in output.maxima.items()}
    )
    old, engine, now = (
        [v for s in by_sequence(batch, values) for v in s]
        for values in (batch.old_logprobs, batch.logprobs, current(batch, 9))  # type: ignore[arg-type]
    )
    raw = [math.exp(p - q) for p, q in zip(old, engine, strict=True)]
    cut = [weight(r, "tis") for r in raw]
    n = len(raw)
    ratio = [math.exp(p - q) for p, q in zip(now, old, strict=True)]
    assert metrics["correction/ratio_mean"] == pytest.approx(sum(raw) / n, rel=1e-5)
    assert metrics["correction/ratio_max"] == pytest.approx(max(raw), rel=1e-5)
    assert metrics["correction/mean"] == pytest.approx(sum(cut) / n, rel=1e-5)
    assert metrics["correction/ess"] == pytest.approx(sum(cut) ** 2 / (n * sum(w * w for w in cut)), rel=1e-5)
    assert metrics["correction/truncated"] == pytest.approx(
        sum(w != r for w, r in zip(cut, raw, strict=True)) / n
    )
    assert metrics["ratio/ess"] == pytest.approx(sum(ratio) ** 2 / (n * sum(r * r for r in ratio)), rel=1e-5)
    assert metrics["ratio/max"] == pytest.approx(max(ratio), rel=1e-5)
    k3 = sum(r - 1 - math.log(r) for r in ratio) / n
    assert metrics["kl/old"] == pytest.approx(k3, rel=1e-4)
    assert metrics["logprob_gap/k1"] == pytest.approx(-sum(map(math.log, raw)) / n, rel=1e-4)
    assert metrics["logprob_gap/k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in raw) / n, rel=1e-4)


def test_what_is_left_out_keeps_its_divergence() -> None:
    batch = ragged(10)
    logprobs = current(batch, 10)
    everything_out = MaskedCorrectionConfig(name="mis", high=1e-6)
    loss = PolicyLoss(ClipLossConfig(), KLConfig(coefficient=0.5, estimator="k2"), everything_out)
    output = loss(batch, logprobs, torch.zeros(batch.num_tokens))
    gap = (logprobs - batch.reference_logprobs)[batch.loss_mask]  # type: ignore[operator]
    assert output.sums["loss/policy"] == 0
    assert output.loss.item() == pytest.approx(0.5 * gap.square().mean().item() / 2, rel=1e-5)
    metrics = finish_metrics({k: v.item() for k, v in output.sums.items()}, {})
    assert metrics["correction/ess"] == 0
    assert metrics["correction/masked"] == 1


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_what_is_left_out_can_leave_the_divisor_the_divergence_and_the_entropy(aggregation: Any) -> None:
    """As in verl, whose masks are taken from the response mask."""
    batch = ragged(7, aggregation)
    logprobs, entropy = current(batch, 7), torch.rand(batch.num_tokens)
    config = KINDS["icepop"]("token").model_copy(update={"divisor": "kept", "off_policy_threshold": 0.05})
    loss = PolicyLoss(
        ClipLossConfig(aggregation=aggregation), KLConfig(coefficient=0.5, estimator="k2"), config, 0.25
    )
    output = loss.prepared(batch, lambda values: values)(batch, logprobs, entropy)
    terms: list[list[float]] = []  # of the tokens that are kept, a list for each sequence with any
    told = (logprobs, batch.old_logprobs, batch.logprobs, batch.reference_logprobs, batch.advantages, entropy)
    sequences = zip(*(by_sequence(batch, values) for values in told), strict=True)  # type: ignore[arg-type]
    for now, old, engine, reference, advantages, spread in sequences:
        drift = sum(q - p for p, q in zip(now, engine, strict=True)) / len(now)
        of_sequence = []
        for p, o, q, r, a, h in zip(now, old, engine, reference, advantages, spread, strict=True):
            if not 0.8 <= math.exp(o - q) <= 1.1:
                continue
            ratio = math.exp(p - o)
            surrogate = -math.exp(o - q) * min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
            surrogate *= not (a < 0 and drift > 0.05)  # off-policy: without a loss, and still in the divisor
            of_sequence.append(surrogate + 0.5 * (p - r) ** 2 / 2 - 0.25 * h)
        terms += [of_sequence] if of_sequence else []
    kept = sum(len(of_sequence) for of_sequence in terms)
    assert 0 < kept < int(batch.loss_mask.sum())
    expected = (
        sum(map(sum, terms)) / kept
        if aggregation == "token-mean"
        else sum(sum(of_sequence) / len(of_sequence) for of_sequence in terms) / len(terms)
    )
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)
    assert output.sums["tokens"] == batch.loss_mask.sum()
    assert output.sums["correction/masked"] == batch.loss_mask.sum() - kept


@pytest.mark.parametrize("form", ["decoupled", "bypass"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_divided_by_their_mean_over_the_step(kind: str, level: str, form: Any) -> None:
    """Over all tokens, or sequences, of both updates, with the old policy; the mask does not enter."""
    batch = ragged(8)
    assert batch.old_logprobs is not None
    update = {"form": form, "normalize": True, "sequence_mask": SequenceMaskConfig(max_difference=0.35)}
    config = KINDS[kind](level).model_copy(update=update)
    loss = PolicyLoss(ReinforceLossConfig(name="reinforce"), correction=config)
    rows = by_sequence(batch, batch.old_logprobs)
    engine = by_sequence(batch, batch.logprobs)  # type: ignore[arg-type]
    weights = [[weight(r, kind) for r in ratios(p, q, level)] for p, q in zip(rows, engine, strict=True)]
    counted = weights if level == "token" else [of_sequence[:1] for of_sequence in weights]
    mean = sum(map(sum, counted)) / sum(map(len, counted))
    logprobs = current(batch, 8)
    for part in ([0, 2], [1, 3]):  # the sequences of each update
        mine = batch.select(part)
        places = torch.cat([torch.arange(*batch.cu_seqlens[i : i + 2].tolist()) for i in part])
        now = logprobs[places].requires_grad_()
        prepared = loss.prepared(mine, lambda values: values, batch)
        apart = replace(loss, correction=config.model_copy(update={"normalize": False}))
        zeros = torch.zeros(mine.num_tokens)
        (found,) = torch.autograd.grad(prepared(mine, now, zeros).loss, now)
        (unscaled,) = torch.autograd.grad(apart(mine, now, zeros).loss, now)
        torch.testing.assert_close(found, unscaled / mean, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_a_mean_of_weights_is_that_of_all_ranks(level: str) -> None:
    batch, config = ragged(8), KINDS["tis"](level)
    mine, others = batch.select([0, 2]), batch.select([1, 3])
    gathered: list[Tensor] = []  # what the other rank gives, in the order in which both are asked

    def keep(values: Tensor) -> Tensor:
        gathered.append(values)
        return values

    mean_weight(others, config, keep)
    found = mean_weight(mine, config, lambda values: torch.cat((values, gathered.pop(0))))
    assert found == pytest.approx(mean_weight(batch, config, lambda values: values), rel=1e-12)


def test_weights_without_any_are_divided_by_1() -> None:
    assert mean_weight(ragged(8), MaskedCorrectionConfig(name="mis", high=1e-6), lambda values: values) == 1


def test_where_all_is_left_out_a_divisor_of_nothing_is_no_error() -> None:
    batch = ragged(10)
    config = MaskedCorrectionConfig(name="mis", high=1e-6, divisor="kept")
    loss = PolicyLoss(ClipLossConfig(), KLConfig(coefficient=0.5, estimator="k2"), config)
    output = loss.prepared(batch, lambda values: values)(
        batch, current(batch, 10), torch.zeros(batch.num_tokens)
    )
    assert output.loss == 0


# Fields with which a loss writes all its metrics.
FIELDS: dict[str, dict[str, Any]] = {
    "clip": {"dual_clip": 3.0},
    "clip_cov": {"fraction": 0.5},
    "kl_cov": {"fraction": 0.5},
}
LOSSES = [names(loss)[0] for loss in variants(PolicyLossConfig) if loss is not CustomLossConfig]


@pytest.mark.parametrize("name", LOSSES)
def test_every_metric_of_a_loss_can_be_named_in_a_config(name: str) -> None:
    config = OnlineConfig(
        name="grpo", num_steps=1, num_prompts_per_step=2, num_generations_per_prompt=2, num_minibatches=2,
        loss={"name": name, **FIELDS.get(name, {})}, kl={"coefficient": 0.1},
        correction={"name": "tis", "sequence_mask": {"low": 0.5, "high": 2.0}, "off_policy_threshold": 0.1},
    )  # fmt: skip
    batch = ragged(11)
    loss = PolicyLoss(config.loss, config.kl, config.correction).prepared(batch, lambda values: values)
    output = loss(batch, current(batch, 11), torch.zeros(batch.num_tokens))
    written = finish_metrics(
        {k: v.item() for k, v in output.sums.items()}, {k: v.item() for k, v in output.maxima.items()}
    ).keys()
    assert written <= metric_names(config, SingleTurnEnvConfig(), ())
    assert config.loss.metrics <= written


def test_metrics_by_age_are_those_of_its_tokens_within_trajectories_of_several_versions() -> None:
    batch = ragged(12)
    versions = torch.arange(batch.num_tokens, dtype=torch.int32) % 4 + 2  # 2 to 5, each trajectory several
    batch = replace(batch, versions=torch.where(batch.loss_mask, versions, -1))
    logprobs = current(batch, 12)
    loss = PolicyLoss(ClipLossConfig(), KLConfig(), KINDS["tis"]("token"), ages=Ages(5, 2))
    output = loss(batch, logprobs, torch.zeros(batch.num_tokens))
    metrics = finish_metrics(
        {name: float(value) for name, value in output.sums.items()},
        {name: float(value) for name, value in output.maxima.items()},
    )
    mask = batch.loss_mask
    weights = weights_by_hand(batch.old_logprobs, batch, "tis", "token")  # type: ignore[arg-type]
    gaps = (logprobs - batch.logprobs)[mask].abs().tolist()  # type: ignore[operator]
    ages = [min(5 - version, 2) for version in versions[mask].tolist()]
    for age in range(3):
        of_age = [(g, w) for g, w, a in zip(gaps, weights, ages, strict=True) if a == age]
        total, square = sum(w for _, w in of_age), sum(w * w for _, w in of_age)
        assert metrics[f"staleness/share_{age}"] == pytest.approx(len(of_age) / len(ages))
        assert metrics[f"staleness/gap_{age}"] == pytest.approx(
            sum(g for g, _ in of_age) / len(of_age), rel=1e-4
        )
        assert metrics[f"staleness/gap_max_{age}"] == pytest.approx(max(g for g, _ in of_age), rel=1e-5)
        assert metrics[f"staleness/ess_{age}"] == pytest.approx(total**2 / (len(of_age) * square), rel=1e-4)
