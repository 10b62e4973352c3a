"""Every layout, micro-batch size and packing computes what one process computes."""

import pytest

from tests.megatron.course import assert_same_course
from tests.megatron.examples import layout

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
