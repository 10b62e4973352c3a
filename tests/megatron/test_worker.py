"""The worker against transformers, and what it does when things go wrong."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.distributed import TCPStore

from nemorl.algorithms.policy_losses import CrossEntropyLoss, PolicyLoss
from nemorl.config.algorithm import MaskedCorrectionConfig
from nemorl.config.algorithm.losses import ClipLossConfig
from nemorl.data.losses import LossOutput
from tests.megatron.cases import LOSS, meet, partition, start_worker
from tests.megatron.examples import (
    FAMILIES,
    LENGTHS,
    layout,
    policy_config,
    ragged_batch,
    reference_collisions,
    reference_entropies,
    reference_logprobs,
)

ALL = partition(len(LENGTHS), 3)


class NotANumber:
    """A loss whose gradient is NaN."""

    needs_entropy = False

    def __call__(self, batch, logprobs, entropy):
        loss = (logprobs * math.nan).sum()
        return LossOutput(loss, {"loss/total": loss.detach()}, {})


@pytest.fixture
def worker(model, start_here):
    """A worker of its own; call it with the fields of its config."""

    def start(family="llama", temperature=1.0, **fields):
        return start_here(policy_config(model(family)[1], **fields), temperature)

    return start


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(worker, model, family, temperature):
    batch = ragged_batch()
    policy = worker(family, temperature)
    policy.load_batch(batch)
    stats = policy.compute_logprobs([[3, 0, 5], [1, 2], [4, 6, 7]], old=True, reference=True, entropy=True)
    expected = reference_logprobs(model(family)[0], batch, temperature)
    torch.testing.assert_close(policy.batch.old_logprobs, expected, atol=1e-4, rtol=0)
    entropies = reference_entropies(model(family)[0], batch, temperature)
    torch.testing.assert_close(policy.batch.old_entropies, entropies, atol=1e-4, rtol=0)
    torch.testing.assert_close(policy.batch.reference_logprobs, expected, atol=1e-4, rtol=0)
    gaps = (expected - batch.logprobs)[batch.loss_mask].abs()
    assert stats.gap_mean == pytest.approx(gaps.mean().item(), rel=1e-4)
    assert stats.gap_max == pytest.approx(gaps.max().item(), rel=1e-4)
    assert stats.num_tokens == int(batch.loss_mask.sum())


def collisions_of(rank, world_size, rendezvous, config, batch):
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_batch(batch)
    micro_batches = partition(batch.num_sequences, 3)
    worker.compute_logprobs(micro_batches, old=True, reference=False, collision=True)
    worker.close()
    return worker.batch


@pytest.mark.parametrize(
    "where", [layout(tp=2, sp=True), layout(cp=2), layout(pp=2)], ids=["TP2-SP", "CP2", "PP2"]
)
def test_collisions_are_those_of_whole_logits_in_every_layout(pool, model, where):
    original, folder = model("llama")
    batch = ragged_batch()
    expected = reference_collisions(original, batch)
    for found in pool.run(where.world_size, collisions_of, policy_config(folder, layout=where), batch):
        torch.testing.assert_close(found.old_collisions, expected, atol=1e-5, rtol=0)
        assert found.old_entropies is None


def test_a_step_of_sgd_equals_transformers(worker, model):
    """Loss, gradient norm and the new weights, by autograd through the other implementation."""
    batch = ragged_batch()
    theirs = model("qwen3")[0]
    bounds = batch.cu_seqlens.tolist()
    loss = torch.zeros(())
    for start, end in itertools.pairwise(bounds):
        tokens = batch.tokens[start:end]
        log_p = theirs(tokens.unsqueeze(0)).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])
        loss = loss - (batch.weights[start + 1 : end] * log_p.squeeze(1)).sum()
    grads = torch.autograd.grad(loss, list(theirs.parameters()))
    norm = math.sqrt(sum(g.square().sum().item() for g in grads))

    policy = worker("qwen3", optimizer={"name": "sgd", "lr": 0.5, "momentum": 0.0}, max_grad_norm=norm / 2)
    policy.load_batch(batch)
    stats = policy.train(ALL, CrossEntropyLoss())
    assert stats.sums["loss/sft"] == pytest.approx(loss.item(), rel=1e-5)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    named = dict(zip((name for name, _ in theirs.named_parameters()), grads, strict=True))
    before = theirs.state_dict()
    parameters = policy.parameters()
    for part in policy.slices():
        mine = parameters[part.param]
        mine = mine.as_strided(part.size, part.strides, mine.storage_offset() + part.offset)
        box = tuple(slice(s, s + n) for s, n in zip(part.start, part.size, strict=True))
        # Half the gradient: its norm was twice the limit.
        torch.testing.assert_close(
            mine, (before[part.name] - 0.25 * named[part.name])[box], atol=2e-5, rtol=1e-4
        )


def test_reference_logprobs_stay_when_the_policy_learns(worker):
    policy = worker()
    policy.load_batch(ragged_batch())
    policy.compute_logprobs(ALL, old=True, reference=True)
    before = policy.batch
    for _ in range(3):
        policy.train(ALL, LOSS)
    policy.compute_logprobs(ALL, old=True, reference=True)
    assert torch.equal(policy.batch.reference_logprobs, before.reference_logprobs)
    assert (policy.batch.old_logprobs - before.old_logprobs).abs().max() > 0.1


def test_a_step_with_nan_gradients_changes_nothing_and_is_counted(worker):
    policy = worker()
    policy.load_batch(ragged_batch())
    policy.train(ALL, CrossEntropyLoss())
    weights = {name: p.clone() for name, p in policy.parameters().items()}
    moments = {name: shard.values.clone() for name, shard in policy.optimizer.shards("exp_avg").items()}

    for _ in range(2):
        stats = policy.train(ALL, NotANumber())
        assert stats.skipped
        assert math.isnan(stats.grad_norm)
    assert all(torch.equal(p, weights[name]) for name, p in policy.parameters().items())
    after = policy.optimizer.shards("exp_avg")
    assert all(torch.equal(shard.values, moments[name]) for name, shard in after.items())
    progress = policy.optimizer.progress
    assert (progress.updates, progress.skipped_in_a_row) == (1, 2)

    assert not policy.train(ALL, CrossEntropyLoss()).skipped
    assert progress.skipped_in_a_row == 0


@pytest.mark.parametrize("where", [layout(), layout(tp=2, sp=True), layout(pp=2), layout(dp=2)])
def test_bfloat16_trains(pool, model, where):
    config = policy_config(model("llama-tied")[1], precision="bfloat16", layout=where)
    for losses in pool.run(where.world_size, learn_by_heart, config):
        assert losses[-1] < 0.6 * losses[0]


def learn_by_heart(rank, world_size, rendezvous, config):
    """Cross-entropy over 12 steps on the same batch."""
    worker = start_worker(rank, world_size, rendezvous, config)
    assert all(p.dtype == torch.bfloat16 for p in worker.parameters().values())
    worker.load_batch(ragged_batch())
    losses = [worker.train(ALL, CrossEntropyLoss()).sums["loss/sft"] for _ in range(12)]
    worker.close()
    return losses


def test_a_micro_batch_without_learned_tokens_is_harmless(worker):
    policy = worker()
    batch = ragged_batch()
    start, end = batch.cu_seqlens.tolist()[2:4]
    for field in (batch.loss_mask, batch.weights):
        field[start:end] = 0
    policy.load_batch(batch)
    policy.compute_logprobs([[2], [0, 1]], old=True, reference=False)
    stats = policy.train([[2], [0, 1]], LOSS)
    assert math.isfinite(stats.grad_norm)
    assert stats.sums["tokens"] == batch.loss_mask[: batch.cu_seqlens[2]].sum()


def test_broken_batches_are_refused(worker):
    policy = worker()
    batch = ragged_batch()
    with pytest.raises(RuntimeError, match="call load_batch"):
        policy.train(ALL, LOSS)
    with pytest.raises(ValueError, match="sequence 0 of the batch has 49 tokens"):
        policy.load_batch(ragged_batch((49,)))
    with pytest.raises(ValueError, match="does not run from 0 to the"):
        policy.load_batch(replace(batch, cu_seqlens=batch.cu_seqlens + 1))
    mask = batch.loss_mask.clone()
    mask[0] = True
    with pytest.raises(ValueError, match="first token of a sequence"):
        policy.load_batch(replace(batch, loss_mask=mask))


def test_a_reference_that_was_not_kept_is_said(worker):
    policy = worker()
    policy.load_batch(ragged_batch())
    policy._reference = None
    with pytest.raises(RuntimeError, match="no reference weights are kept"):
        policy.compute_logprobs(ALL, old=False, reference=True)


def test_header_names_what_is_in_use(worker):
    header = worker().header()
    assert header["device"] == "cpu"
    assert header["backend"] == "gloo"
    assert header["layout"] == "one process"
    assert header["attention kernel"] == "torch scaled_dot_product_attention in buckets"
    assert header["layer kernels"] == "megatron-core local"
    assert set(header) >= {"activation kernel", "optimizer kernel", "threads", "precision", "torch"}


def test_a_wrong_number_of_processes_is_refused(pool, model):
    config = policy_config(model("llama")[1], layout=layout(tp=2, dp=2))
    wanted = r"requires 4 processes \(2 TP x 1 PP x 1 CP x 2 DP\) but 2 were started"
    with pytest.raises(AssertionError, match=wanted):
        pool.run(2, learn_by_heart, config)


def test_a_step_without_any_gradient_changes_nothing(worker):
    """As where a correction left out every token: neither momentum nor decay moves, and no rate is used."""
    policy = worker(optimizer={"name": "adam", "lr": 0.1, "weight_decay": 0.1}, schedule={"warmup_steps": 5})
    policy.load_batch(ragged_batch())
    assert not policy.train(ALL, LOSS).empty
    weights = {name: p.clone() for name, p in policy.parameters().items()}
    moments = {name: shard.values.clone() for name, shard in policy.optimizer.shards("exp_avg").items()}
    policy.load_batch(replace(ragged_batch(), logprobs=torch.full_like(ragged_batch().logprobs, -30.0)))
    masked = PolicyLoss(ClipLossConfig(), correction=MaskedCorrectionConfig(name="mis"))
    stats = policy.train(ALL, masked)
    assert (stats.empty, stats.skipped, stats.grad_norm) == (True, False, 0.0)
    assert stats.sums["tokens"] == ragged_batch().loss_mask.sum()
    assert all(torch.equal(p, weights[name]) for name, p in policy.parameters().items())
    after = policy.optimizer.shards("exp_avg")
    assert all(torch.equal(shard.values, moments[name]) for name, shard in after.items())
    assert policy.optimizer.progress.updates == 1


def test_a_process_may_start_later_than_a_collective_may_take(pool):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert pool.run(2, meet, f"127.0.0.1:{store.port}", 10.0) == [2, 2]
