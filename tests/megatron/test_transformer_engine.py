"""Megatron's own Transformer Engine layers, on a stand-in of the library that computes on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemorl.config.policy import AdamConfig, Fp8Config, LoraConfig, OffloadConfig
from nemorl.megatron.kernels import Kernels
from nemorl.megatron.model import local_name, transformer_config
from nemorl.models.registry import load_shape
from tests.megatron.examples import layout, policy_config, ragged_batch, reference_logprobs
from tests.megatron.pool import Pool, pool_with
from tests.megatron.te_cases import (
    LOCAL,
    TRANSFORMER_ENGINE,
    live_with,
    live_with_its_adam,
    names_of_rank,
    resume_with_fused_adam,
)

PLACEHOLDER = Path(__file__).parent / "transformer_engine_stand_in"
FAMILIES = ["llama-tied", "qwen3", "gemma3", "qwen3-moe", "gpt-oss", "deepseek-v3"]


@pytest.fixture(scope="module")
def engine_pool() -> Iterator[Pool]:
    with pool_with(PLACEHOLDER) as pool:
        yield pool


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *((family, {}) for family in FAMILIES),
        *((family, {"tp": 2, "sp": True}) for family in FAMILIES),
        ("qwen3-moe", {"tp": 2, "ep": 2}),
        ("qwen3-moe", {"tp": 2, "etp": 2}),
    ],
)
def test_both_kinds_of_layers_hold_the_same_parameters(engine_pool, model, family, sizes):
    config = policy_config(model(family)[1], layout=layout(**sizes))
    last_rank = config.layout.world_size - 1

    (names,) = engine_pool.run(1, names_of_rank, config, last_rank)

    assert names.transformer_engine != names.local
    assert {local_name(name): shape for name, shape in names.transformer_engine.items()} == names.local
    assert names.mapped == names.local.keys()
    assert not names.unmarked


@pytest.mark.parametrize("family", FAMILIES)
def test_both_kinds_of_layers_compute_and_learn_the_same(engine_pool, model, family):
    reference, folder = model(family)
    config, batches = policy_config(folder), [ragged_batch(seed=seed) for seed in (1, 2)]

    (engine,) = engine_pool.run(1, live_with, TRANSFORMER_ENGINE, config, batches)
    (local,) = engine_pool.run(1, live_with, LOCAL, config, batches)

    torch.testing.assert_close(engine.logprobs, reference_logprobs(reference, batches[0]), atol=1e-4, rtol=0)
    for ours, theirs in zip(engine.steps, local.steps, strict=True):
        assert ours.sums == pytest.approx(theirs.sums, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)


@pytest.mark.parametrize("family", ["llama-tied", "gemma3", "deepseek-v3"])
def test_adapters_learn_the_same_next_to_both_kinds_of_layers(engine_pool, model, family):
    """Transformer Engine's modules have norms of their own before some matrices."""
    config = policy_config(model(family)[1], lora=LoraConfig(rank=4, alpha=8))
    batches = [ragged_batch(seed=seed) for seed in (1, 2)]

    (engine,) = engine_pool.run(1, live_with, TRANSFORMER_ENGINE, config, batches)
    (local,) = engine_pool.run(1, live_with, LOCAL, config, batches)

    for ours, theirs in zip(engine.steps, local.steps, strict=True):
        assert ours.sums["loss/total"] == pytest.approx(theirs.sums["loss/total"], rel=1e-5)
        assert ours.sums["kl/reference"] == pytest.approx(theirs.sums["kl/reference"], rel=1e-4, abs=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)


def test_its_adam_learns_as_torchs(engine_pool, model):
    """Also the gradient norm is the library's, which Megatron prefers."""
    config, batches = policy_config(model("qwen3")[1]), [ragged_batch(seed=seed) for seed in (1, 2, 3)]

    ((module, engine),) = engine_pool.run(1, live_with_its_adam, config, batches)
    (torchs,) = engine_pool.run(1, live_with, LOCAL, config, batches)

    assert module == "transformer_engine.pytorch.optimizers"
    for ours, theirs in zip(engine.steps, torchs.steps, strict=True):
        assert ours.sums == pytest.approx(theirs.sums, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)


BFLOAT16 = AdamConfig(
    lr=3e-3, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16", main_grads_dtype="bfloat16"
)
SCALED = AdamConfig(lr=3e-3, exp_avg_dtype="fp8", exp_avg_sq_dtype="float16")
HALF_WEIGHTS = AdamConfig(lr=3e-3, main_params_dtype="float16")


@pytest.mark.parametrize(
    ("adam", "types", "num_bytes"),
    [
        (BFLOAT16, [torch.float32, torch.bfloat16, torch.bfloat16], 2 + 4 + 2 + 2),
        (SCALED, [torch.float32, torch.uint8, torch.float16], 4 + 4 + 1 + 2),
        (HALF_WEIGHTS, [torch.float16, torch.float32, torch.float32], 4 + 2 + 4 + 4),
    ],
    ids=["bfloat16", "scaled", "float16 weights"],
)
def test_an_adam_of_fewer_bits_learns_and_continues(engine_pool, model, tmp_path, adam, types, num_bytes):
    """On the stand-in's FusedAdam, whose states come and go as float32."""
    reference, folder = model("qwen3")
    config = policy_config(
        folder, precision="bfloat16", optimizer=adam, offload=OffloadConfig(optimizer=True)
    )
    plain = policy_config(folder, precision="bfloat16")

    (run,) = engine_pool.run(1, resume_with_fused_adam, config, tmp_path)
    (beside,) = engine_pool.run(1, live_with, LOCAL, plain, [ragged_batch(seed=seed) for seed in (0, 1)])

    assert run.adams == {"transformer_engine.pytorch.optimizers"}
    assert run.states == dict(
        zip(("master_param", "exp_avg", "exp_avg_sq"), ([t] for t in types), strict=True)
    )
    num_parameters = sum(p.numel() for p in reference.parameters())
    assert run.offloaded == pytest.approx([num_bytes * num_parameters], rel=0.02)
    for ours, theirs in zip(run.first, beside.steps, strict=True):
        assert ours.sums["loss/total"] == pytest.approx(theirs.sums["loss/total"], rel=2e-2)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-2)
    if adam is HALF_WEIGHTS:
        # The model's weights were rounded before the optimizer's: a few are others when rounded again.
        for ours, theirs in zip(run.resumed, run.went_on, strict=True):
            assert ours.sums["loss/total"] == pytest.approx(theirs.sums["loss/total"], rel=1e-3)
    else:
        assert run.resumed == run.went_on
        assert not run.changed


def test_fp8_is_passed_to_megatron(model):
    folder = model("llama")[1]
    for fp8, passed in ((Fp8Config(recipe="blockwise"), ("hybrid", "blockwise")), (None, (None, "delayed"))):
        policy = policy_config(folder, precision="bfloat16", fp8=fp8)
        made = transformer_config(load_shape(folder), policy, "cuda", Kernels(layers="transformer_engine"))
        assert (made.fp8, made.fp8_recipe) == passed
