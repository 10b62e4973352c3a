"""Tokens that sequences begin with in common, computed once, give what separate sequences give."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nemorl.config.generation import SamplingConfig
from nemorl.config.policy import MoeConfig, SelectiveRecompute
from nemorl.data.packed import PackedBatch
from nemorl.megatron.worker import PolicyWorker
from nemorl.plan.utilization import ModelWork
from tests.megatron.cases import LOSS, live
from tests.megatron.course import assert_same_course
from tests.megatron.examples import FAMILIES, layout, policy_config, ragged_batch
from tests.megatron.pool import Pool

Model = Callable[[str], tuple[PreTrainedModel, Path]]
Start = Callable[..., PolicyWorker]
Computed = Callable[..., dict[str, Any]]

# Two groups of four, of which two data-parallel copies have one each.
LENGTHS = (48, 30, 22, 48, 33, 21, 40, 20)
# In the micro-batches below: of the first group 20 + 19 + 9 + 1 + 2 + 13, of the second 30 and 17 + 31 + 4.
NUM_DISTINCT = 146


def tree_batch(seed: int = 1) -> PackedBatch:
    """A prompt of 20 tokens, and another one of 17; two pairs have more in common, and one has sampled it.

    One sequence is the beginning of another one.
    """
    batch = ragged_batch(LENGTHS, seed)
    starts, tokens, mask = batch.cu_seqlens.tolist(), batch.tokens.clone(), batch.loss_mask.clone()
    for of_group, prompt in (((0, 2, 4, 6), 20), ((1, 3, 5, 7), 17)):
        first = starts[of_group[0]]
        for number in of_group:
            tokens[starts[number] : starts[number] + prompt] = tokens[first : first + prompt]
            mask[starts[number] : starts[number] + prompt] = False
            mask[starts[number] + prompt : starts[number + 1]] = True
    for one, other, common in ((0, 6, 39), (1, 3, 25), (5, 7, 20)):
        tokens[starts[other] : starts[other] + common] = tokens[starts[one] : starts[one] + common]
    weights = mask / mask.sum()
    return replace(batch, tokens=tokens, loss_mask=mask, weights=weights, logprobs=batch.logprobs * mask)


@pytest.fixture
def computed(model: Model, start_here: Start) -> Computed:
    """Logprobs, entropies, metrics and gradients of a batch in two micro-batches, shared and not."""

    def compute(
        family: str,
        batch: PackedBatch,
        *,
        shares: bool,
        filters: SamplingConfig | None = None,
        **fields: object,
    ) -> dict[str, Any]:
        config = policy_config(model(family)[1], share_prefixes=shares, **fields)
        worker = start_here(config, filters=filters)
        micro_batches = [[0, 2, 4, 6, 1], [3, 5, 7]]
        worker.load_batch(batch)
        worker.compute_logprobs(micro_batches, old=True, reference=False, entropy=True, collision=True)
        stats = worker.train(micro_batches, LOSS)
        grads = [
            parameter.main_grad.flatten().clone()
            for module in worker._modules
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
        worker.close()
        return {
            "logprobs": worker.batch.old_logprobs,
            "entropies": worker.batch.old_entropies,
            "collisions": worker.batch.old_collisions,
            "gradients": torch.cat(grads),
            "stats": stats,
            "shape": worker._shape,
        }

    return compute


def assert_equal(shared: dict[str, Any], apart: dict[str, Any]) -> None:
    """Within what float32 and sums in another order change."""
    for name in ("logprobs", "entropies", "collisions"):
        torch.testing.assert_close(shared[name], apart[name], atol=1e-5, rtol=1e-5)
    gradients = apart["gradients"]
    assert (shared["gradients"] - gradients).norm() <= 1e-4 * gradients.norm()
    for name, value in apart["stats"].sums.items():
        assert shared["stats"].sums[name] == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert (
        shared["stats"].num_tokens == apart["stats"].num_tokens == apart["stats"].num_distinct == sum(LENGTHS)
    )
    assert shared["stats"].num_distinct == NUM_DISTINCT


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_tokens_change_no_result(computed: Computed, family: str) -> None:
    batch = tree_batch()
    shared, apart = (computed(family, batch, shares=shares) for shares in (True, False))
    assert_equal(shared, apart)
    scored = int(batch.loss_mask.sum())
    work = ModelWork.of(apart["shape"]).training([(0, length) for length in LENGTHS], scored)
    assert apart["stats"].flops == pytest.approx(work)
    saved = 1 - NUM_DISTINCT / sum(LENGTHS)
    assert 0.5 * saved < 1 - shared["stats"].flops / work < 1.5 * saved  # attention and the head differ
    assert (apart["stats"].peak_tflops, shared["stats"].peak_tflops) == (None, None)  # of a CPU


@pytest.mark.parametrize("modules", [("core_attn", "layernorm", "mlp"), ("moe", "core_attn")])
def test_shared_tokens_are_computed_again(computed: Computed, modules: Any) -> None:
    family, again = (
        "qwen3-moe" if "moe" in modules else "llama",
        SelectiveRecompute(name="selective", modules=modules),
    )
    results = (computed(family, tree_batch(), shares=shares, recompute=again) for shares in (True, False))
    assert_equal(*results)


def test_shared_tokens_of_a_filtered_distribution(computed: Computed) -> None:
    filters = SamplingConfig(top_k=20, top_p=0.8)
    shared, apart = (
        computed("llama", tree_batch(), shares=shares, filters=filters) for shares in (True, False)
    )
    assert 0 < apart["stats"].sums["sampling/dropped"] < apart["stats"].sums["tokens"]
    assert_equal(shared, apart)


def test_experts_count_a_shared_token_for_each_sequence(computed: Computed) -> None:
    moe = MoeConfig(load_balancing_loss_coefficient=0.7)
    shared, apart = (computed("qwen3-moe", tree_batch(), shares=shares, moe=moe) for shares in (True, False))
    assert_equal(shared, apart)
    assert shared["stats"].experts == pytest.approx(apart["stats"].experts, rel=1e-5)
    assert apart["stats"].experts["loss/balance"] > 0


@pytest.mark.parametrize("place", [3, 19])
def test_tokens_that_were_sampled_with_other_experts_are_not_shared(computed: Computed, place: int) -> None:
    """Of one sequence of the first group, from this token on."""
    moe = MoeConfig(router_replay=True)
    batch = tree_batch()
    experts = torch.zeros(batch.num_tokens, 2, 2, dtype=torch.int16)
    experts[..., 1] = 1
    experts[batch.cu_seqlens[2] + place, 1] = torch.tensor([2, 3], dtype=torch.int16)
    batch = replace(batch, routed_experts=experts)
    shared, apart = (computed("qwen3-moe", batch, shares=shares, moe=moe) for shares in (True, False))
    torch.testing.assert_close(shared["logprobs"], apart["logprobs"], atol=1e-5, rtol=1e-5)
    assert (shared["gradients"] - apart["gradients"]).norm() <= 1e-4 * apart["gradients"].norm()
    assert shared["stats"].num_distinct == NUM_DISTINCT + 20 - place


LAYOUTS = {
    "TP2": layout(tp=2),
    "TP2-SP": layout(tp=2, sp=True),
    "PP2-VPP2": layout(pp=2, vpp=2),
    "CP2": layout(cp=2),
    "CP2-TP2-SP": layout(cp=2, tp=2, sp=True),
    "DP2": layout(dp=2),
    "EP2": layout(dp=2, ep=2),
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in LAYOUTS if name != "EP2"),
        ("gemma3", "CP2"),
        ("gpt-oss", "CP2-TP2-SP"),
        ("qwen3-moe", "EP2"),
        ("deepseek-v3", "TP2-SP"),
        ("deepseek-v3", "CP2"),
    ],
)
def test_every_layout_shares_tokens(pool: Pool, model: Model, family: str, name: str) -> None:
    """Three steps next to one process that shares nothing."""
    batches = [tree_batch(seed) for seed in range(3)]
    config = policy_config(model(family)[1], layout=LAYOUTS[name])
    (alone,) = pool.run(1, live, policy_config(model(family)[1], share_prefixes=False), batches, 8)
    for life in pool.run(config.layout.world_size, live, config, batches, 4):
        assert_same_course(life, alone)
        assert all(step.num_distinct < step.num_tokens for step in life.steps)
        assert all(0 < step.flops < one.flops for step, one in zip(life.steps, alone.steps, strict=True))


def test_a_critic_values_shared_tokens_in_each_sequence(model: Model, start_here: Start) -> None:
    values = []
    for shares in (True, False):
        config = policy_config(model("llama")[1], head="scalar", share_prefixes=shares)
        worker = start_here(config)
        worker.parameters()["scalar_head.weight"].normal_(generator=torch.Generator().manual_seed(1))
        worker.load_batch(tree_batch())
        worker.compute_values([list(range(8))])
        values.append(worker.batch.values)
        worker.close()
    assert values[0].abs().max() > 1
    # Sums of 32 products in float32, each of a few units.
    torch.testing.assert_close(*values, atol=5e-5, rtol=1e-5)


def test_the_likeliest_tokens_are_found_for_each_sequence(model: Model, start_here: Start) -> None:
    found = []
    for shares in (True, False):
        worker = start_here(policy_config(model("llama")[1], share_prefixes=shares))
        worker.load_batch(tree_batch())
        worker.compute_top([list(range(8))], 3)
        found.append(worker.batch)
        worker.close()
    shared, apart = found
    assert torch.equal(shared.top_ids, apart.top_ids)
    torch.testing.assert_close(shared.top_logprobs, apart.top_logprobs, atol=1e-5, rtol=1e-5)
