"""What reinforcement learning asks of routers: replay, a balance loss, standing still, counts."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from nemorl.config.policy import AdamConfig, MoeConfig, SelectiveRecompute
from nemorl.data.losses import LossOutput
from tests.megatron.cases import LOSS, live, partition, share, start_worker
from tests.megatron.course import assert_same_course
from tests.megatron.examples import layout, policy_config, ragged_batch, reference_logprobs

EXPERTS, TOP_K, LAYERS = 4, 2, 2  # of the tiny Qwen3-MoE, whose first two layers have no experts
BALANCE = 0.7


class Nothing:
    """A loss without a gradient."""

    needs_entropy = False

    def __call__(self, batch, logprobs, entropy):
        return LossOutput(loss=logprobs.sum() * 0, sums={}, maxima={})


def with_choices(batch, seed=3, own=0.0):
    """The batch with random experts for every token and layer; for a share of `own` tokens the router's."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch.num_tokens, LAYERS, EXPERTS, generator=generator).argsort(-1)
    experts = order[..., :TOP_K].to(torch.int16)
    experts[torch.rand(batch.num_tokens, generator=generator) < own] = -1
    return replace(batch, routed_experts=experts)


def forced_logprobs(model, batch):
    """By transformers, whose routers are made to choose the experts of the batch."""
    logprobs = []
    for number in range(batch.num_sequences):
        sequence = batch.select([number])
        with mock.patch.multiple(type(model.model.layers[2].mlp.gate), forward=_forced, create=True):
            for layer in range(LAYERS):
                model.model.layers[2 + layer].mlp.gate.given = sequence.routed_experts[:, layer].long()
            logprobs.append(reference_logprobs(model, sequence))
    return torch.cat(logprobs)


def _forced(router, hidden):
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    return logits, logits.softmax(-1).gather(1, router.given), router.given


def logprobs_of(rank, world_size, rendezvous, config, batch):
    """Those of the policy, and those of the reference (the same weights)."""
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_batch(batch)
    worker.compute_logprobs(partition(batch.num_sequences, 3), old=True, reference=True)
    worker.close()
    return worker.batch.old_logprobs, worker.batch.reference_logprobs


def test_replayed_choices_take_the_place_of_the_routers_own(pool, model):
    original, folder = model("qwen3-moe")
    batch = with_choices(ragged_batch())
    config = policy_config(folder, moe=MoeConfig(router_replay=True))
    ((policy, reference),) = pool.run(1, logprobs_of, config, batch)
    own = reference_logprobs(original, batch)
    torch.testing.assert_close(policy, forced_logprobs(original, batch), atol=1e-4, rtol=0)
    torch.testing.assert_close(reference, own, atol=1e-4, rtol=0)
    assert (policy - own).abs().max() > 0.1  # the choices mattered


def test_choices_without_replay_are_not_used(pool, model):
    original, folder = model("qwen3-moe")
    batch = with_choices(ragged_batch())
    ((policy, _),) = pool.run(1, logprobs_of, policy_config(folder), batch)
    torch.testing.assert_close(policy, reference_logprobs(original, batch), atol=1e-4, rtol=0)


def test_replay_requires_choices(pool, model):
    config = policy_config(model("qwen3-moe")[1], moe=MoeConfig(router_replay=True))
    with pytest.raises(AssertionError, match="the batch names no experts: the generation back end"):
        pool.run(1, logprobs_of, config, ragged_batch())


def test_a_rank_whose_trajectories_all_failed_has_none(pool, model):
    config = policy_config(model("qwen3-moe")[1], moe=MoeConfig(router_replay=True))
    batch = ragged_batch()
    failed = replace(
        batch, loss_mask=torch.zeros_like(batch.loss_mask), weights=torch.zeros_like(batch.weights)
    )
    ((policy, _),) = pool.run(1, logprobs_of, config, failed)
    assert not policy.any()


ALL = MoeConfig(router_replay=True, load_balancing_loss_coefficient=BALANCE)


@pytest.mark.parametrize(
    ("where", "recompute"),
    [
        (layout(tp=2, sp=True, ep=2), None),
        (layout(pp=2, vpp=2), SelectiveRecompute(name="selective", modules=("moe",))),
        (layout(cp=2, ep=2), None),
    ],
    ids=["TP2-SP-EP2", "PP2-VPP2 recomputed", "CP2-EP2"],
)
def test_replay_and_balance_do_not_depend_on_the_layout(pool, model, where, recompute):
    folder = model("qwen3-moe")[1]
    batches = [with_choices(ragged_batch(seed=seed), seed, own=0.3) for seed in range(3)]
    (alone,) = pool.run(1, live, policy_config(folder, moe=ALL), batches, 8)
    fields = {} if recompute is None else {"recompute": recompute}
    config = policy_config(folder, moe=ALL, layout=where, **fields)
    for life in pool.run(where.world_size, live, config, batches, 3):
        assert_same_course(life, alone)
        for mine, its in zip(life.steps, alone.steps, strict=True):
            assert mine.experts == pytest.approx(its.experts, rel=1e-5)


def own_choices(model, batch):
    """[N, layers, top_k] of transformers' routers, by their number."""
    chosen = []
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        logits = model(batch.tokens[start:end].unsqueeze(0), output_router_logits=True).router_logits
        chosen.append(torch.stack([one.topk(TOP_K).indices.sort().values for one in logits], dim=1))
    return torch.cat(chosen).to(torch.int16)


def updates_of(rank, world_size, rendezvous, config, batch, per_micro_batch):
    """Two updates on the same sequences, and the experts of the batch before them."""
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_batch(share(batch, rank, config))
    micro_batches = partition(worker.batch.num_sequences, per_micro_batch)
    worker.compute_logprobs(micro_batches, old=True, reference=True)
    steps = [worker.train(micro_batches, LOSS) for _ in range(2)]
    worker.close()
    return worker.batch.routed_experts, steps


@pytest.mark.parametrize(
    "where",
    [layout(), layout(tp=2, sp=True, ep=2), layout(pp=2, vpp=2), layout(cp=2, ep=2)],
    ids=["alone", "TP2-SP-EP2", "PP2-VPP2", "CP2-EP2"],
)
def test_updates_take_the_experts_of_the_pass_for_old_logprobs(pool, model, where):
    """Transformers' choices, recorded in every layout; the updates are those with the same ones replayed."""
    original, folder = model("qwen3-moe")
    batch, sgd = ragged_batch(), {"name": "sgd", "lr": 5.0, "momentum": 0.0}
    fields = {"optimizer": sgd, "max_grad_norm": None}
    chosen = own_choices(original, batch)
    given = policy_config(folder, moe=MoeConfig(router_replay=True), **fields)
    ((_, replayed),) = pool.run(1, updates_of, given, replace(batch, routed_experts=chosen), 8)
    ((_, free),) = pool.run(1, updates_of, policy_config(folder, **fields), batch, 8)
    config = policy_config(folder, moe=MoeConfig(update_replay=True), layout=where, **fields)
    for experts, steps in pool.run(where.world_size, updates_of, config, batch, 3):
        assert torch.equal(experts.sort().values, chosen)
        for mine, its in zip(steps, replayed, strict=True):
            assert mine.sums == pytest.approx(its.sums, rel=1e-4, abs=1e-5)
            assert mine.experts == pytest.approx(its.experts, rel=1e-5)
    assert replayed[0].grad_norm == pytest.approx(free[0].grad_norm, rel=1e-5)
    assert replayed[1].experts != pytest.approx(free[1].experts, rel=1e-3)  # the routers have moved


def train_on_nothing(rank, world_size, rendezvous, config, batch):
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_batch(share(batch, rank, config))
    stats = worker.train(partition(worker.batch.num_sequences, 3), Nothing())
    worker.close()
    return stats


def test_balance_loss_and_counts_are_the_written_out_ones(pool, model):
    """The gradient norm of the balance loss alone, by transformers' autograd; one expert is never chosen."""
    original, folder = model("qwen3-moe")
    batch, loss = ragged_batch(), 0.0
    counts = torch.zeros(LAYERS, EXPERTS)
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[start:end].unsqueeze(0)
        for layer, logits in enumerate(original(tokens, output_router_logits=True).router_logits):
            p = logits.softmax(-1)
            chosen = torch.zeros_like(p).scatter(1, p.topk(TOP_K).indices, 1.0)
            fraction = chosen.sum(0) * EXPERTS / (TOP_K * (end - start))
            loss = loss + (fraction * p.mean(0)).sum() / batch.num_sequences
            counts[layer] += chosen.sum(0)
    parameters = [p for p in original.parameters() if p.requires_grad]
    grads = torch.autograd.grad(BALANCE * loss, parameters, allow_unused=True)
    norm = torch.stack([g.norm() for g in grads if g is not None]).norm()

    config = policy_config(folder, moe=MoeConfig(load_balancing_loss_coefficient=BALANCE))
    (stats,) = pool.run(1, train_on_nothing, config, batch)
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-4)
    largest = counts.amax(1) / counts.mean(1)
    assert stats.experts == pytest.approx(
        {
            "experts/load_max": float(largest.mean()),
            "experts/load_max_of_a_layer": float(largest.max()),
            "experts/idle": float((counts == 0).float().mean()),
            "loss/balance": float(loss.detach()),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("where", [layout(), layout(cp=2, ep=2)], ids=["alone", "CP2-EP2"])
def test_the_z_loss_is_the_written_out_one(pool, model, where):
    """Its gradient norm alone, by transformers' autograd: the mean over all tokens, whatever the layout."""
    original, folder = model("qwen3-moe")
    batch, coefficient, loss = ragged_batch(), 0.3, 0.0
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[start:end].unsqueeze(0)
        for logits in original(tokens, output_router_logits=True).router_logits:
            loss = loss + logits.exp().sum(-1).log().square().sum() / batch.num_tokens
    parameters = [p for p in original.parameters() if p.requires_grad]
    grads = torch.autograd.grad(coefficient * loss, parameters, allow_unused=True)
    norm = torch.stack([g.norm() for g in grads if g is not None]).norm()

    config = policy_config(folder, moe=MoeConfig(z_loss_coefficient=coefficient), layout=where)
    stats = pool.run(where.world_size, train_on_nothing, config, batch)[0]
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert stats.experts["loss/router_z"] == pytest.approx(float(loss.detach()), rel=1e-5)


def biases_of_a_step(rank, world_size, rendezvous, config, batch, loss):
    """Of each layer with experts on this rank, before and after."""
    worker = start_worker(rank, world_size, rendezvous, config)
    named = {name: p for name, p in worker.parameters().items() if name.endswith(".expert_bias")}
    before = {name: bias.clone() for name, bias in named.items()}
    worker.load_batch(share(batch, rank, config))
    micro_batches = partition(worker.batch.num_sequences, 3)
    worker.compute_logprobs(micro_batches, old=True, reference=True)
    worker.train(micro_batches, loss)
    result = [(before[name], bias.clone()) for name, bias in named.items()]
    worker.close()
    return result


@pytest.mark.parametrize("where", [layout(), layout(tp=2, sp=True, dp=2, ep=2)], ids=["alone", "TP2-SP-DP2"])
def test_the_bias_of_routers_moves_towards_experts_with_few_tokens(pool, model, where):
    """By arXiv 2408.15664: up below the mean number of tokens, down above it, as transformers routes them."""
    original, folder = model("deepseek-v3")
    batch, chosen = ragged_batch(), []
    gates = [m for name, m in original.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _, __, out: chosen.append(out[2])) for gate in gates]
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        original(batch.tokens[start:end].unsqueeze(0))
    for hook in hooks:
        hook.remove()
    config = policy_config(folder, moe=MoeConfig(bias_update_rate=0.01), layout=where)
    found = pool.run(where.world_size, biases_of_a_step, config, batch, LOSS)
    for of_rank in found:
        assert len(of_rank) == len(gates)
        for layer, (before, after) in enumerate(of_rank):
            numbers = torch.cat(chosen[layer :: len(gates)]).flatten()
            counts = torch.bincount(numbers, minlength=len(before)).double()
            expected = before + 0.01 * torch.sign(counts.mean() - counts)
            torch.testing.assert_close(after, expected.float(), atol=1e-7, rtol=0)
            assert not torch.equal(after, before)


def test_an_update_that_changes_nothing_leaves_the_bias(pool, model):
    config = policy_config(model("deepseek-v3")[1], moe=MoeConfig(bias_update_rate=0.01))
    (found,) = pool.run(1, biases_of_a_step, config, ragged_batch(), Nothing())
    assert all(torch.equal(before, after) for before, after in found)


def weights_after_two_steps(rank, world_size, rendezvous, config):
    worker = start_worker(rank, world_size, rendezvous, config)
    before = {name: p.clone() for name, p in worker.parameters().items()}
    for seed in range(2):
        worker.load_batch(ragged_batch(seed=seed))
        everything = partition(worker.batch.num_sequences, 3)
        worker.compute_logprobs(everything, old=True, reference=True)
        worker.train(everything, LOSS)
    same = {name: torch.equal(p, before[name]) for name, p in worker.parameters().items()}
    worker.close()
    return same


@pytest.mark.parametrize("freeze", [False, True])
def test_a_frozen_router_stays_while_all_else_learns(pool, model, freeze):
    config = policy_config(
        model("gpt-oss")[1],
        moe=MoeConfig(freeze_router=freeze),
        optimizer=AdamConfig(lr=1e-2, weight_decay=0.1),
    )
    (same,) = pool.run(1, weights_after_two_steps, config)
    for name, stayed in same.items():
        assert stayed == (freeze and ".router." in name), name
