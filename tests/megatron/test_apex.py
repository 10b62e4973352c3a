"""What of NVIDIA's apex Megatron uses for a policy, on a stand-in that computes on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nemorl.megatron.kernels import Kernels
from tests.megatron.examples import policy_config, ragged_batch
from tests.megatron.pool import Pool, pool_with
from tests.megatron.te_cases import LOCAL, live_with, live_with_its_adam

STAND_IN = Path(__file__).parent / "apex_stand_in"
FUSED_GRADIENTS = Kernels(fused_gradients=True)
BATCHES = [ragged_batch(seed=seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def apex_pool() -> Iterator[Pool]:
    with pool_with(STAND_IN) as pool:
        yield pool


def test_its_adam_learns_as_torchs(apex_pool, model):
    config = policy_config(model("qwen3")[1])

    ((module, apex),) = apex_pool.run(1, live_with_its_adam, config, BATCHES)
    (torchs,) = apex_pool.run(1, live_with, LOCAL, config, BATCHES)

    assert module == "apex.optimizers"
    for ours, theirs in zip(apex.steps, torchs.steps, strict=True):
        assert ours.sums == pytest.approx(theirs.sums, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradients_that_are_added_in_place_are_the_same(apex_pool, model, precision):
    """Several micro-batches: the kernel adds to the sum of those before."""
    config = policy_config(model("qwen3")[1], precision=precision)

    (fused,) = apex_pool.run(1, live_with, FUSED_GRADIENTS, config, BATCHES)
    (separate,) = apex_pool.run(1, live_with, LOCAL, config, BATCHES)

    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[precision]
    for ours, theirs in zip(fused.steps, separate.steps, strict=True):
        assert ours.sums["loss/total"] == pytest.approx(theirs.sums["loss/total"], rel=tolerance)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=tolerance)
