"""Losses, advantages and aggregation against formulas written out in plain Python floats."""

import math

import pytest
import torch

from nemorl.algorithms.objective import finish_metrics, sequence_weights
from nemorl.algorithms.policy_losses import CrossEntropyLoss, PolicyLoss
from nemorl.config.algorithm import KLConfig
from nemorl.config.algorithm.losses import ClipLossConfig
from nemorl.data.packed import PackedBatch

KL = KLConfig(coefficient=0.05)
ENTROPY = 0.01
LENGTHS = [5, 3, 6]
PROMPTS = [2, 1, 3]


def ragged_batch(seed: int, aggregation: str = "token-mean", *, old: bool = True) -> PackedBatch:
    """Three sequences whose prompts are not trained on."""
    g = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    mask = torch.cat(
        [torch.arange(length) >= prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    )
    sampled = [length - prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    weights = sequence_weights(sampled, aggregation, length=7)
    return PackedBatch(
        tokens=torch.randint(0, 9, (n,), generator=g),
        cu_seqlens=torch.tensor([0, 5, 8, 14], dtype=torch.int32),
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS]),
        loss_mask=mask,
        weights=weights.repeat_interleave(torch.tensor(LENGTHS)) * mask,
        advantages=torch.tensor([1.3, -0.7, 0.4]).repeat_interleave(torch.tensor(LENGTHS)),
        logprobs=torch.randn(n, generator=g) - 2,
        old_logprobs=torch.randn(n, generator=g) - 2 if old else None,
        reference_logprobs=torch.randn(n, generator=g) - 2,
    )


def written_out(batch: PackedBatch, logprobs: list[float], entropy: list[float], c: ClipLossConfig) -> float:
    """The GRPO objective, one token at a time, then aggregated by its definition."""
    per_sequence: list[list[float]] = []
    start = 0
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        losses = []
        for i in range(start + prompt, start + length):
            old = logprobs[i] if batch.old_logprobs is None else batch.old_logprobs[i].item()
            advantage, reference = batch.advantages[i].item(), batch.reference_logprobs[i].item()  # type: ignore[index]
            ratio = math.exp(logprobs[i] - old)
            clipped = min(max(ratio, 1 - c.clip_low), 1 + c.clip_high)
            policy = -min(ratio * advantage, clipped * advantage)
            kl = math.exp(reference - logprobs[i]) - (reference - logprobs[i]) - 1
            losses.append(policy + KL.coefficient * kl - ENTROPY * entropy[i])
        per_sequence.append(losses)
        start += length
    match c.aggregation:
        case "token-mean":
            return sum(map(sum, per_sequence)) / sum(map(len, per_sequence))
        case "seq-mean-token-mean":
            return sum(sum(s) / len(s) for s in per_sequence) / len(per_sequence)
        case "seq-mean-token-sum":
            return sum(map(sum, per_sequence)) / len(per_sequence)
        case "seq-mean-token-sum-norm":
            return sum(sum(s) / 7 for s in per_sequence) / len(per_sequence)
        case "token-sum":
            return float(sum(map(sum, per_sequence)))


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    "aggregation",
    ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"],
)
def test_grpo_loss_equals_the_formula_and_its_gradient(aggregation: str, old: bool) -> None:
    config = ClipLossConfig(
        clip_low=0.2, clip_high=0.28, aggregation=aggregation, aggregation_length=7,  # type: ignore[arg-type]
    )  # fmt: skip
    batch = ragged_batch(0, aggregation, old=old)
    logprobs = (torch.randn(14, generator=torch.Generator().manual_seed(5)) - 2).requires_grad_()
    entropy = torch.rand(14, generator=torch.Generator().manual_seed(6))
    output = PolicyLoss(config, KL, entropy_coefficient=ENTROPY)(batch, logprobs, entropy)
    values = logprobs.detach().double().tolist()
    assert output.loss.item() == pytest.approx(written_out(batch, values, entropy.tolist(), config), rel=1e-5)

    if not old:
        return  # the ratio is 1 by stop-gradient there, which finite differences of the formula cannot see
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    for i in range(14):
        up, down = list(values), list(values)
        up[i] += 1e-5
        down[i] -= 1e-5
        numeric = (
            written_out(batch, up, entropy.tolist(), config)
            - written_out(batch, down, entropy.tolist(), config)
        ) / 2e-5
        assert gradient[i].item() == pytest.approx(numeric, rel=1e-3, abs=1e-6)


def test_on_policy_gradient_is_minus_advantage_times_weight() -> None:
    batch = ragged_batch(1, old=False)
    logprobs = (torch.randn(14) - 2).requires_grad_()
    (gradient,) = torch.autograd.grad(
        PolicyLoss(ClipLossConfig())(batch, logprobs, torch.zeros(14)).loss, logprobs
    )
    torch.testing.assert_close(gradient, -batch.advantages * batch.weights)  # type: ignore[operator]


def test_splitting_the_batch_does_not_change_sums() -> None:
    loss = PolicyLoss(ClipLossConfig(), KL)
    batch = ragged_batch(2)
    logprobs, entropy = torch.randn(14) - 2, torch.rand(14)
    whole = loss(batch, logprobs, entropy)
    index = {0: slice(0, 5), 1: slice(5, 8), 2: slice(8, 14)}
    parts = [
        loss(
            batch.select(list(p)),
            torch.cat([logprobs[index[s]] for s in p]),
            torch.cat([entropy[index[s]] for s in p]),
        )
        for p in ((2, 0), (1,))
    ]
    for key, value in whole.sums.items():
        assert sum(p.sums[key].item() for p in parts) == pytest.approx(value.item(), rel=1e-5)
    assert max(p.maxima["logprob_gap/max"] for p in parts) == whole.maxima["logprob_gap/max"]


def test_metrics_of_a_step_are_means_over_sampled_tokens() -> None:
    batch = ragged_batch(3)
    logprobs = torch.randn(14) - 2
    entropy = torch.rand(14)
    output = PolicyLoss(ClipLossConfig())(batch, logprobs, entropy)
    metrics = finish_metrics({k: v.item() for k, v in output.sums.items()}, {})
    assert metrics["entropy"] == pytest.approx(entropy[batch.loss_mask].mean().item(), rel=1e-5)
    gap = (logprobs - batch.logprobs)[batch.loss_mask].abs().mean().item()  # type: ignore[operator]
    assert metrics["logprob_gap/mean"] == pytest.approx(gap, rel=1e-5)
    assert metrics["loss/policy"] == pytest.approx(output.loss.item(), rel=1e-5)


def test_cross_entropy_is_the_mean_negative_logprob_of_completions() -> None:
    batch = ragged_batch(4)
    logprobs = torch.randn(14) - 2
    expected = -logprobs[batch.loss_mask].mean().item()
    assert CrossEntropyLoss()(batch, logprobs, None).loss.item() == pytest.approx(expected, rel=1e-5)


def test_sequences_without_sampled_tokens_do_not_count() -> None:
    assert sequence_weights([2, 0, 3], "seq-mean-token-mean").tolist() == pytest.approx([1 / 4, 0, 1 / 6])
    assert sequence_weights([2, 0, 3], "token-mean").tolist() == pytest.approx([1 / 5, 0, 1 / 5])
    with pytest.raises(ValueError, match="aggregation_length"):
        sequence_weights([2], "seq-mean-token-sum-norm")


def test_a_single_token_has_the_whole_weight() -> None:
    assert sequence_weights([1, 0], "token-mean").tolist() == [1, 0]
    assert sequence_weights([5], "seq-mean-token-sum").tolist() == [1]
    assert sequence_weights([0, 0], "token-mean").tolist() == [0, 0]
    assert finish_metrics({"tokens": 1.0, "entropy": 3.0, "loss/total": 2.0}, {"largest": 5.0}) == {
        "entropy": 3.0,
        "loss/total": 2.0,
        "largest": 5.0,
    }
