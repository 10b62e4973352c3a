"""The critic's loss against a loop, and its gradient."""

import pytest
import torch

from nemorl.algorithms.policy_losses import ValueLoss, value_metrics
from nemorl.config.algorithm.losses import CriticLearningConfig
from nemorl.data.losses import TrainStats
from nemorl.data.packed import PackedBatch

LENGTHS = (5, 1, 7, 4)


def batch_of(seed: int = 0) -> PackedBatch:
    torch.manual_seed(seed)
    size = sum(LENGTHS)
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    mask = torch.rand(size) < 0.6
    mask[torch.tensor(starts[:-1])] = False
    return PackedBatch(
        tokens=torch.zeros(size, dtype=torch.long),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        position_ids=torch.zeros(size, dtype=torch.long),
        loss_mask=mask,
        weights=torch.rand(size) * mask,
        values=torch.randn(size),
        returns=torch.randn(size) * mask,
    )


def by_hand(batch, values, clip):
    """Sum over the sampled tokens of the larger of two squared errors, of the value before each."""
    total = torch.zeros((), dtype=torch.float64)
    for i in batch.loss_mask.nonzero().squeeze(1).tolist():
        value, old, target = values[i - 1], batch.values[i - 1].double(), batch.returns[i].double()
        worst = (value - target) ** 2
        if clip is not None:
            bounded = old + max(min(value - old, torch.tensor(clip)), torch.tensor(-clip))
            worst = max(worst, (bounded - target) ** 2)
        total = total + batch.weights[i].double() * worst / 2
    return total


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_the_larger_of_clipped_and_unclipped_error_and_its_gradient(clip):
    batch = batch_of()
    values = torch.randn(batch.num_tokens, requires_grad=True)
    output = ValueLoss(CriticLearningConfig(value_clip=clip))(batch, values, None)
    exact = values.detach().double().requires_grad_()
    expected = by_hand(batch, exact, clip)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(output.loss, values)
    (its,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(gradient, its.float(), atol=1e-6, rtol=1e-5)
    assert gradient.abs().sum() > 0
    # Whatever comes after the last sampled token of a sequence is of no consequence.
    assert gradient[batch.num_tokens - 1] == 0


@pytest.mark.parametrize("clip", [None, 0.2])
def test_any_split_into_micro_batches_gives_the_same(clip):
    batch = batch_of()
    values = torch.randn(batch.num_tokens)
    loss = ValueLoss(CriticLearningConfig(value_clip=clip))
    whole = loss(batch, values, None)
    rows = values.split(batch.lengths)
    parts = [
        loss(batch.select(part), torch.cat([rows[s] for s in part]), None) for part in ([2], [3, 0], [1])
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-5)
    for name, value in whole.sums.items():
        assert sum(part.sums[name].item() for part in parts) == pytest.approx(
            value.item(), rel=1e-5, abs=1e-6
        )


def stats(sums: dict[str, float]) -> TrainStats:
    return TrainStats(sums, {}, 1.0, 0.1, False, False, 9, 9, 9)


def test_metrics_of_a_step():
    batch = batch_of()
    output = ValueLoss(CriticLearningConfig())(batch, batch.values, None)
    metrics = value_metrics([stats({name: value.item() for name, value in output.sums.items()})] * 2)
    places = batch.loss_mask.nonzero().squeeze(1)
    values, returns = batch.values[places - 1].double(), batch.returns[places].double()
    assert metrics["critic/value"] == pytest.approx(values.mean().item(), abs=1e-6)
    assert metrics["critic/return"] == pytest.approx(returns.mean().item(), abs=1e-6)
    explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert metrics["critic/explained_variance"] == pytest.approx(explained.item(), abs=1e-5)
    assert metrics["critic/loss"] == pytest.approx(output.loss.item())
    assert metrics["critic/clip_fraction"] == 0


def test_returns_that_do_not_vary_are_not_explained():
    sums = {"loss/total": 0.0, "tokens": 4.0, "value": 0.0, "return": 2.0, "return_squared": 1.0}
    sums |= {"error": 2.0, "error_squared": 1.0, "clip_fraction": 0.0}
    assert value_metrics([stats(sums)])["critic/explained_variance"] == 0
