"""Training on what the filters of sampling keep, against a formula over transformers' logits."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from nemorl.algorithms.policy_losses import PolicyLoss
from nemorl.config.algorithm import KLConfig
from nemorl.config.algorithm.losses import ClipLossConfig
from nemorl.config.generation import SamplingConfig
from tests.megatron.cases import LOSS, assert_moved, live, partition
from tests.megatron.course import assert_same_course
from tests.megatron.examples import LENGTHS, layout, policy_config, ragged_batch
from tests.megatron.test_filtered_head import kept_by_definition

ALL = partition(len(LENGTHS), 3)
FILTERS = SamplingConfig(temperature=0.8, top_k=30, top_p=0.9)
SGD = {"optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.0}, "max_grad_norm": None}


def by_formula(model, batch, temperature, filters):
    """[N] each: filtered logprobs, entropies and collisions, which are dropped, and unfiltered logprobs."""
    logprobs, entropies, collisions, complete = (
        torch.zeros(batch.num_tokens, dtype=torch.float64) for _ in range(4)
    )
    dropped = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[start:end]
        ids, places = tokens[1:, None], slice(start + 1, end)
        logits = model(tokens.unsqueeze(0)).logits[0, :-1].double() / temperature
        kept = kept_by_definition(logits.detach(), filters)
        total = logits.masked_fill(~kept, -math.inf).logsumexp(-1, keepdim=True)
        log_p = torch.where(kept, logits - total, 0.0)
        logprobs[places] = log_p.gather(1, ids).squeeze(1)
        entropies[places] = -torch.where(kept, log_p.exp() * log_p, 0.0).sum(-1)
        collisions[places] = torch.where(kept, log_p.exp() ** 2, 0.0).sum(-1)
        complete[places] = logits.log_softmax(-1).gather(1, ids).squeeze(1)
        dropped[places] = ~kept.gather(1, ids).squeeze(1)
    mask = batch.loss_mask
    return logprobs * mask, entropies * mask, collisions * mask, dropped & mask, complete * mask


@pytest.fixture
def worker(model, start_here):
    config = policy_config(model("llama")[1], **SGD)
    return start_here(config, FILTERS.temperature, filters=FILTERS)


def test_logprobs_before_the_update_are_filtered_and_those_of_the_reference_are_not(worker, model):
    batch = ragged_batch()
    filters = {"top_k": FILTERS.top_k, "top_p": FILTERS.top_p}
    with torch.no_grad():
        logprobs, entropies, collisions, dropped, complete = by_formula(
            model("llama")[0], batch, FILTERS.temperature, filters
        )
    assert 0.1 < dropped.sum() / batch.loss_mask.sum() < 0.9
    assert (logprobs[dropped] == 0).all()

    worker.load_batch(batch)
    stats = worker.compute_logprobs(ALL, old=True, reference=True, entropy=True, collision=True)

    found = worker.batch
    torch.testing.assert_close(found.old_logprobs.double(), logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.old_entropies.double(), entropies, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.old_collisions.double(), collisions, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.reference_logprobs.double(), complete, atol=1e-5, rtol=0)
    gaps = (logprobs - batch.logprobs)[batch.loss_mask].abs()  # of a dropped token the engine's logprob
    assert stats.gap_mean == pytest.approx(gaps.mean().item(), rel=1e-5)


@pytest.mark.parametrize("sampled_by", [None, "current", "engine"])
def test_an_update_is_that_of_the_formula(worker, model, sampled_by):
    """Ratio and entropy of what is kept; the divergence of all tokens; of a dropped token nothing else."""
    kl = KLConfig(coefficient=0.3)
    if sampled_by is not None:
        kl = KLConfig(coefficient=0.3, importance_weighted=True, sampled_by=sampled_by)
    loss = PolicyLoss(ClipLossConfig(), kl, entropy_coefficient=0.1)
    theirs, batch = model("llama")[0], ragged_batch()
    filters = {"top_k": FILTERS.top_k, "top_p": FILTERS.top_p}
    logprobs, entropies, _, dropped, complete = by_formula(theirs, batch, FILTERS.temperature, filters)
    noise = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(0)) * 0.1
    old = torch.where(dropped, 0.0, (logprobs.detach() + noise[0]).float()) * batch.loss_mask
    reference = (complete.detach() + noise[1]).float() * batch.loss_mask
    batch = replace(batch, old_logprobs=old, reference_logprobs=reference)

    # A dropped token has ratio 1 and no gradient, but for that of the divergence.
    ratio = (logprobs - old).exp()
    surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    x = complete - reference
    divergence = (-x).exp() - 1 + x
    if sampled_by is not None:
        taken = complete.detach() if sampled_by == "current" else batch.logprobs
        divergence = divergence * (complete - taken).clamp(max=20).exp()
    terms = -surrogate + 0.3 * divergence - 0.1 * entropies
    total = (batch.weights * terms)[batch.loss_mask].sum()
    grads = torch.autograd.grad(total, list(theirs.parameters()))
    names = [name for name, _ in theirs.named_parameters()]

    worker.load_batch(batch)
    stats = worker.train(ALL, loss)

    assert stats.sums["loss/total"] == pytest.approx(total.item(), rel=1e-5)
    assert stats.sums["sampling/dropped"] == dropped.sum()
    assert stats.sums["entropy"] == pytest.approx(entropies.sum().item(), rel=1e-5)
    assert_moved(worker, theirs, dict(zip(names, grads, strict=True)), atol=2e-5)


def test_without_filters_there_is_no_metric_of_them(model, start_here):
    worker = start_here(policy_config(model("llama")[1], **SGD))
    worker.load_batch(ragged_batch())
    assert "sampling/dropped" not in worker.train(ALL, LOSS).sums


@pytest.mark.ci
@pytest.mark.parametrize(
    "where",
    [layout(tp=2, sp=True), layout(pp=2), layout(cp=2, tp=2)],
    ids=["TP2-SP", "PP2", "CP2-TP2"],
)
def test_three_steps_equal_one_process(pool, model, where):
    batches = [ragged_batch(seed=seed) for seed in range(3)]
    folder = model("llama")[1]
    (alone,) = pool.run(1, live, policy_config(folder), batches, 8, FILTERS)
    for life in pool.run(where.world_size, live, policy_config(folder, layout=where), batches, 3, FILTERS):
        assert_same_course(life, alone)
        for mine, its in zip(life.steps, alone.steps, strict=True):
            assert mine.sums["sampling/dropped"] == its.sums["sampling/dropped"] > 0
