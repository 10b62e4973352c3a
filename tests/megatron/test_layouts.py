"""Every layout, micro-batch size and packing computes what one process computes."""

import random
from collections.abc import Iterator

import pytest
import torch

from nemorl.config.policy import FullRecompute, LayoutConfig, NoRecompute, RecomputeConfig, SelectiveRecompute
from nemorl.models.layout_rules import layout_problems, recompute_problems
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape
from tests.megatron.cases import weights_after_steps
from tests.megatron.course import assert_same_course
from tests.megatron.examples import FAMILIES, layout, policy_config, ragged_batch
from tests.selection import in_all

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


@pytest.mark.parametrize("per_micro_batch", [3, *in_all(1)])
@pytest.mark.parametrize(
    "name",
    [
        "TP2-SP",
        "PP2",
        "PP2-uneven",
        "PP2-VPP2",
        "DP2",
        "CP2-TP2-SP",
        *in_all("TP2", "CP2", "CP2-DP2", "TP2-PP2"),
    ],
)
def test_five_steps_equal_one_process(run, name, per_micro_batch):
    (alone,) = run("llama", layout(), 8)
    for life in run("llama", LAYOUTS[name], per_micro_batch):
        assert_same_course(life, alone)


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("llama-tied", layout(dp=2, pp=2)),
        ("qwen3-moe", layout(dp=2, ep=2)),
        *in_all(("llama", layout(dp=2)), ("llama", layout(cp=2, pp=2, vpp=2))),
    ],
)
def test_reductions_during_the_backward_pass_change_no_bit(pool, model, family, where):
    """Without clipping: its norm is a sum over shards, which other buckets divide otherwise."""
    config = policy_config(model(family)[1], layout=where, max_grad_norm=None)
    during, after = (
        pool.run(where.world_size, weights_after_steps, config, ragged_batch(), 2, overlaps)
        for overlaps in (True, False)
    )
    for one, other in zip(during, after, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", ["llama-tied", "gemma3", *in_all("qwen2", "qwen3", "mistral")])
@pytest.mark.parametrize("name", ["TP2-PP2", *in_all("TP2", "TP2-SP")])
def test_five_steps_of_each_family_equal_one_process(run, family, name):
    (alone,) = run(family, layout(), 8)
    for life in run(family, LAYOUTS[name], 3):
        assert_same_course(life, alone)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", *in_all("mistral", "qwen3-moe")])
def test_windows_sinks_and_experts_under_context_parallelism(run, family):
    (alone,) = run(family, layout(), 8)
    for life in run(family, layout(cp=2, tp=2, sp=True), 3):
        assert_same_course(life, alone)


@pytest.mark.parametrize("sp", [True, *in_all(False)])
def test_more_ranks_than_key_value_heads(run, sp):
    (alone,) = run("qwen3-two-groups", layout(), 8)
    for life in run("qwen3-two-groups", layout(tp=4, sp=sp), 3):
        assert_same_course(life, alone)


SELECTIVE = SelectiveRecompute(name="selective", modules=("core_attn", "layernorm", "mlp"))
RECOMPUTATIONS = {
    "full": (layout(), FullRecompute(name="full")),
    "full-block": (layout(), FullRecompute(name="full", method="block", num_layers=3)),
    "full-two-PP2-VPP2": (layout(pp=2, vpp=2), FullRecompute(name="full")),
    "selective": (layout(), SELECTIVE),
    "selective-TP2-SP": (layout(tp=2, sp=True), SELECTIVE),
    "selective-CP2-PP2": (layout(cp=2, pp=2), SELECTIVE),
}


@pytest.mark.parametrize(
    "name",
    [
        "full",
        "full-block",
        "full-two-PP2-VPP2",
        "selective-TP2-SP",
        *in_all("selective", "selective-CP2-PP2"),
    ],
)
def test_five_steps_with_recomputation_equal_one_process_without(run, name):
    (alone,) = run("llama", layout(), 8)
    for life in run("llama", RECOMPUTATIONS[name][0], 3, RECOMPUTATIONS[name][1]):
        assert_same_course(life, alone)


def test_experts_computed_again(run):
    (alone,) = run("qwen3-moe", layout(), 8)
    again = SelectiveRecompute(name="selective", modules=("moe", "core_attn"))
    for life in run("qwen3-moe", layout(tp=2, sp=True, ep=2), 3, again):
        assert_same_course(life, alone)


ETP = {
    "DP2 ETP2": layout(dp=2, etp=2),
    "DP4 EP2 ETP2": layout(dp=4, ep=2, etp=2),
    "TP2-SP DP2 EP2 ETP2": layout(tp=2, sp=True, dp=2, ep=2, etp=2),
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "TP2-SP DP2 EP2 ETP2"),
        *in_all(("qwen3-moe", "DP2 ETP2"), ("mixtral", "DP4 EP2 ETP2")),
    ],
)
def test_copies_that_share_the_matrices_of_experts_equal_one_process(run, family, name):
    """Their batches differ in length, so they exchange uneven numbers of tokens."""
    (alone,) = run(family, layout(), 8)
    for life in run(family, ETP[name], 3):
        assert_same_course(life, alone)


FAST_FAMILIES = ("llama-tied", "qwen3", "gemma3", "qwen3-moe", "gpt-oss", "deepseek-v3")


def drawn(seed: int, shape_of) -> tuple[str, LayoutConfig, int, RecomputeConfig]:
    """A family, a valid layout of two to four processes, a size of micro-batches and what is recomputed."""
    draw = random.Random(seed)
    families = FAST_FAMILIES if seed < 12 else FAMILIES
    family = families[seed % len(families)]
    return next(case for case in _cases(draw, family) if _is_valid(shape_of(family), case[1], case[3]))


def _cases(draw: random.Random, family: str) -> Iterator[tuple[str, LayoutConfig, int, RecomputeConfig]]:
    while True:
        tp, sp = draw.choice([(1, False), (2, False), (2, True), (4, True)])
        where = layout(
            tp=tp,
            sp=sp,
            pp=draw.choice([1, 2, 2, 4]),
            vpp=draw.choice([1, 2]),
            first=draw.choice([None, 1, 2]),
            cp=draw.choice([1, 2, 3, 4]),
            dp=draw.choice([1, 2, 4]),
            ep=draw.choice([1, 2, 4]),
            etp=draw.choice([1, 1, 2, 4]),
        )
        recompute = draw.choice(
            [NoRecompute(), FullRecompute(name="full"), SELECTIVE, FullRecompute(name="full", num_layers=2)]
        )
        if 2 <= where.world_size <= 4:
            yield family, where, draw.choice([1, 2]), recompute


def _is_valid(shape: ModelShape, where: LayoutConfig, recompute: RecomputeConfig) -> bool:
    return not (any(layout_problems(shape, where)) or any(recompute_problems(shape, where, recompute)))


@pytest.mark.parametrize("seed", [*range(2), *in_all(*range(2, 72))])
def test_layouts_drawn_at_random_equal_one_process(run, model, seed):
    """Eight sequences: two for each of four copies, so that two interleaved stages have one each."""
    family, where, per_micro_batch, recompute = drawn(seed, lambda family: load_shape(model(family)[1]))
    interleaved = where.virtual_pipeline_parallel_size > 1
    (alone,) = run(family, layout(), 8)
    for life in run(family, where, 1 if interleaved else per_micro_batch, recompute):
        assert_same_course(life, alone)


@pytest.mark.parametrize("name", ["TP2-SP-PP2", "EP2", *in_all("TP2-SP", "CP2")])
def test_five_steps_of_deepseek_v3_equal_one_process(run, name):
    """With experts Megatron requires sequence parallelism next to tensor parallelism."""
    (alone,) = run("deepseek-v3", layout(), 8)
    for life in run("deepseek-v3", LAYOUTS[name], 3):
        assert_same_course(life, alone)
