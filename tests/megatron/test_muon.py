"""Muon against its formula in float64, and under layouts that fuse and divide its matrices."""

from unittest import mock

import pytest
import torch

from nemorl.config.policy import MuonConfig
from nemorl.device import approximation_dtype
from nemorl.megatron import inner_optimizer
from nemorl.megatron.inner_optimizer import orthogonalize
from nemorl.models.tensors import local_view
from tests.megatron.cases import LOSS, live, partition, start_worker
from tests.megatron.examples import layout, policy_config, ragged_batch
from tests.megatron.test_checkpoint import continue_from, save_in_the_middle

MUON = MuonConfig(name="muon", lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("shape", [(96, 64), (64, 96)])
def test_bfloat16_of_a_gpu_brings_singular_values_as_near_to_one(monkeypatch, shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = orthogonalize(matrix, 5)
    assert {kind: approximation_dtype(torch.device(kind)) for kind in ("cpu", "cuda")} == {
        "cpu": torch.float32,
        "cuda": torch.bfloat16,
    }
    monkeypatch.setattr(inner_optimizer, "approximation_dtype", lambda device: torch.bfloat16)
    rounded = orthogonalize(matrix, 5)
    assert rounded.dtype == torch.float32
    assert float((rounded - exact).norm() / exact.norm()) < 0.05
    for found in (exact, rounded):
        values = torch.linalg.svdvals(found)
        assert 0.6 < float(values.min()) < float(values.max()) < 1.3


def in_hf_names(worker, values):
    """Tensors by HF name, in float64, of what a single process has by parameter."""
    parts = [(part.name, local_view(values, part).double()) for part in worker.slices()]
    names = dict.fromkeys(name for name, _ in parts)
    return {name: torch.cat([box for of, box in parts if of == name]) for name in names}


def record_steps(rank, world_size, rendezvous, config, num_steps):
    """Weights before and after, and the gradients that every step took, by HF names."""
    worker = start_worker(rank, world_size, rendezvous, config)
    gradients, take = [], worker.optimizer.megatron.step_with_ready_grads

    def recording():
        grads = {name: part.gradient for name, part in worker.optimizer._main.items()}
        gradients.append(in_hf_names(worker, grads))
        return take()

    before = in_hf_names(worker, worker.parameters())
    with mock.patch.object(worker.optimizer.megatron, "step_with_ready_grads", recording):
        for seed in range(num_steps):
            worker.load_batch(ragged_batch(seed=seed))
            worker.compute_logprobs(partition(8, 8), old=True, reference=True)
            worker.train(partition(8, 8), LOSS)
    after = in_hf_names(worker, worker.parameters())
    worker.close()
    return before, gradients, after


def newton_schulz(x):
    """Five iterations of X <- a X + b (X X') X + c (X X')^2 X from X / |X|."""
    x = x / x.square().sum().sqrt()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


def by_formula(name, weight, gradients):
    """Weights after these steps."""
    momentum = first = second = torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        if weight.dim() == 2:
            weight = weight - MUON.lr * MUON.weight_decay * weight
        if weight.dim() == 2 and name not in ("model.embed_tokens.weight", "lm_head.weight"):
            momentum = 0.95 * momentum + 0.05 * gradient
            direction = newton_schulz(0.95 * momentum + 0.05 * gradient)
            weight = weight - MUON.lr * 0.2 * max(weight.shape) ** 0.5 * direction
        else:
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            root = (second / (1 - 0.999**step)).sqrt()
            weight = weight - MUON.lr * first / (1 - 0.9**step) / (root + 1e-8)
    return weight


def test_three_steps_are_the_formula(pool, model):
    config = policy_config(model("qwen2")[1], optimizer=MUON)
    ((before, gradients, after),) = pool.run(1, record_steps, config, 3)
    assert len(gradients) == 3
    for name, weight in before.items():
        expected = by_formula(name, weight, [step[name] for step in gradients])
        torch.testing.assert_close(after[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("qwen2", layout(tp=2, sp=True)),
        ("llama-tied", layout(tp=2, pp=2)),
        ("llama-tied", layout(dp=2)),
        ("mixtral", layout(dp=2, ep=2)),
    ],
    ids=["TP2-SP", "TP2-PP2", "DP2", "EP2"],
)
def test_every_layout_takes_the_same_steps(pool, model, family, where):
    batches = [ragged_batch(seed=seed) for seed in range(4)]
    config = policy_config(model(family)[1], optimizer=MUON)
    (alone,) = pool.run(1, live, config, batches, 8)
    there = config.model_copy(update={"layout": where})
    for life in pool.run(where.world_size, live, there, batches, 3):
        for mine, its in zip(life.steps, alone.steps, strict=True):
            assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=1e-5)
            assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-4)


def test_bfloat16_weights_follow_their_float32_copies(pool, model, tmp_path):
    config = policy_config(
        model("llama-tied")[1], optimizer=MUON, precision="bfloat16", layout=layout(tp=2, dp=2)
    )
    saved = pool.run(4, save_in_the_middle, config, tmp_path)
    for ours, theirs in zip(pool.run(4, continue_from, config, tmp_path), saved, strict=True):
        assert ours[0] == theirs[0]
        assert all(torch.equal(ours[1][name], weight) for name, weight in theirs[1].items())


def test_another_layout_continues_the_same_run(pool, model, tmp_path):
    folder = model("llama-tied")[1]
    here = policy_config(folder, optimizer=MUON, layout=layout(tp=2, dp=2))
    saved = pool.run(4, save_in_the_middle, here, tmp_path)
    there = policy_config(folder, optimizer=MUON, layout=layout(pp=2))
    for steps, _ in pool.run(2, continue_from, there, tmp_path):
        for mine, its in zip(steps, saved[0][0], strict=True):
            assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=1e-5)
