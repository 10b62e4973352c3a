"""Every layout, micro-batch size and packing computes what one process computes."""

from functools import cache

import pytest

from nemorl.config.policy import LayoutConfig
from tests.megatron.cases import Life, live
from tests.megatron.examples import layout, policy_config, ragged_batch

LAYOUTS = {
    "TP2": layout(tp=2),
    "TP2-SP": layout(tp=2, sp=True),
    "PP2": layout(pp=2),
    "PP2-uneven": layout(pp=2, first=1),
    "PP2-VPP2": layout(pp=2, vpp=2),
    "DP2": layout(dp=2),
    "CP2": layout(cp=2),
    "CP2-TP2-SP": layout(cp=2, tp=2, sp=True),
    "CP2-DP2": layout(cp=2, dp=2),
    "TP2-PP2": layout(tp=2, pp=2),
    "TP2-SP-PP2": layout(tp=2, sp=True, pp=2),
    "EP2": layout(dp=2, ep=2),
}
STEPS = 5


@pytest.fixture(scope="module")
def run(pool, model):
    @cache
    def run(family: str, where: LayoutConfig, per_micro_batch: int) -> list[Life]:
        config = policy_config(model(family)[1], layout=where)
        batches = [ragged_batch(seed=seed) for seed in range(STEPS)]
        return pool.run(where.world_size, live, config, batches, per_micro_batch)

    return run


@pytest.mark.parametrize("per_micro_batch", [1, 3])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("TP2-SP-PP2", "EP2")])
def test_five_steps_equal_one_process(run, name, per_micro_batch):
    (alone,) = run("llama", layout(), 8)
    for life in run("llama", LAYOUTS[name], per_micro_batch):
        assert_same_course(life, alone)


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("name", ["TP2", "TP2-SP", "TP2-PP2"])
def test_five_steps_of_each_family_equal_one_process(run, family, name):
    (alone,) = run(family, layout(), 8)
    for life in run(family, LAYOUTS[name], 3):
        assert_same_course(life, alone)


@pytest.mark.parametrize("name", ["TP2-SP", "TP2-SP-PP2", "EP2", "CP2"])
def test_five_steps_of_deepseek_v3_equal_one_process(run, name):
    """With experts Megatron wants sequence parallelism beside tensor parallelism."""
    (alone,) = run("deepseek-v3", layout(), 8)
    for life in run("deepseek-v3", LAYOUTS[name], 3):
        assert_same_course(life, alone)


def assert_same_course(life: Life, alone: Life) -> None:
    assert life.gap.gap_mean == pytest.approx(alone.gap.gap_mean, rel=1e-5)
    assert life.gap.num_tokens == alone.gap.num_tokens
    for mine, its in zip(life.steps, alone.steps, strict=True):
        assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=1e-5)
        assert mine.sums["entropy"] == pytest.approx(its.sums["entropy"], rel=1e-5)
        assert mine.sums["kl/reference"] == pytest.approx(its.sums["kl/reference"], rel=1e-4, abs=1e-6)
        assert mine.maxima["logprob_gap/max"] == pytest.approx(its.maxima["logprob_gap/max"], rel=1e-4)
        assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-4)
        assert mine.num_tokens == its.num_tokens
