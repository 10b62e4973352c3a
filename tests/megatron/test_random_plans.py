"""A thousand layouts drawn at random: the plan and megatron-core's own construction agree on each.

Megatron's ranks are those of its `RankGenerator`, as `initialize_model_parallel` uses it, without processes.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from nemorl.config.load import load_experiment
from nemorl.config.policy import LayoutConfig
from nemorl.megatron.kernels import Kernels
from nemorl.megatron.model import transformer_config
from nemorl.models.layout import policy_rank, stage_layers
from nemorl.models.shape import ModelShape
from nemorl.plan.memory import policy_memory
from nemorl.plan.operations import sent_elements
from nemorl.plan.problems import policy_layout_problems
from tests.config.experiments import write
from tests.plan.published import shape_of

MODELS = ("Llama-3.1-8B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3")
NUM_DRAWN = 1000
MAX_RANKS = 512


def drawn(draw: random.Random, shape: ModelShape) -> LayoutConfig:
    """Half of the draws are of what usually divides, so that many are valid."""
    small, tensor = draw.choice([1, 2, 4, 8]), draw.choice([1, 1, 2, 3, 4, 8, 16])
    while True:
        has_experts = shape.moe is not None and draw.random() < 0.8
        layout = LayoutConfig(
            tensor_parallel_size=tensor,
            sequence_parallel=draw.random() < 0.5 if tensor > 1 else draw.random() < 0.05,
            pipeline_parallel_size=draw.choice([1, 1, 2, 3, 4, 6, 8]),
            virtual_pipeline_parallel_size=draw.choice([1, 1, 1, 2, 3]),
            layers_in_first_stage=draw.choice([None, None, None, 1, 3, 7]),
            layers_in_last_stage=draw.choice([None, None, None, 1, 4]),
            context_parallel_size=draw.choice([1, 1, 2, 4]),
            data_parallel_size=draw.choice([1, 2, 3, small]),
            expert_parallel_size=draw.choice([1, 2, 4, 8, 16]) if has_experts else draw.choice([1] * 9 + [2]),
            expert_tensor_parallel_size=draw.choice([1, 1, 1, 2]) if has_experts else 1,
        )
        if layout.world_size <= MAX_RANKS:
            return layout


def of_megatron(layout: LayoutConfig) -> Iterator[tuple[str, list[list[int]]]]:
    """Groups of ranks by axis. Raises what Megatron raises."""
    tensor, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    context, experts = layout.context_parallel_size, layout.expert_parallel_size
    size = layout.expert_tensor_parallel_size
    copies, rest = divmod(layout.world_size, size * experts * stages)
    if rest:  # as `initialize_model_parallel` says it
        raise RuntimeError(f"world_size ({layout.world_size}) is not divisible")
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tensor, 1, layout.data_parallel_size, stages, context, order)
    sparse = RankGenerator(size, experts, copies, stages, 1, order)
    yield from ((axis, dense.get_ranks(axis)) for axis in ("tp", "pp", "cp", "dp"))
    yield from ((name, sparse.get_ranks(axis)) for name, axis in (("etp", "tp"), ("ep", "ep")))


def assert_groups_agree(layout: LayoutConfig) -> None:
    """Each group of an axis has every place of it once and in order; copies have the same part."""
    ranks = [policy_rank(layout, rank) for rank in range(layout.world_size)]
    places = {"tp": "tp_rank", "pp": "pp_rank", "etp": "etp_rank", "ep": "ep_rank"}
    for axis, groups in of_megatron(layout):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        for group in groups:
            if axis in places:
                assert [getattr(ranks[rank], places[axis]) for rank in group] == list(range(len(group)))
            else:  # copies of a part have the same of every dense axis
                assert len({(ranks[rank].tp_rank, ranks[rank].pp_rank) for rank in group}) == 1


def assert_layers_agree(shape: ModelShape, layout: LayoutConfig, config: TransformerConfig) -> None:
    chunks = layout.virtual_pipeline_parallel_size
    for stage in range(layout.pipeline_parallel_size):
        for chunk in range(chunks):
            vp_stage = chunk if chunks > 1 else None
            first = get_transformer_layer_offset(config, vp_stage, stage)
            count = get_num_layers_to_build(config, vp_stage, stage)
            assert stage_layers(shape.num_layers, layout, stage, chunk) == range(first, first + count)


def test_a_thousand_layouts_are_planned_as_megatron_builds_them(tmp_path: Path) -> None:
    fields = (
        "policy.precision=bfloat16",
        "policy.max_sequence_length=4096",
        "policy.micro_batch_tokens=4096",
    )
    base = load_experiment(write(tmp_path), fields)
    draw, accepted, refused_by_both = random.Random(7), 0, 0
    for _ in range(NUM_DRAWN):
        shape = shape_of(draw.choice(MODELS))
        layout = drawn(draw, shape)
        policy = base.policy.model_copy(update={"layout": layout})
        experiment = base.model_copy(update={"policy": policy})

        problems = list(policy_layout_problems(experiment, shape))
        try:
            config = transformer_config(shape, policy, "cpu", Kernels())
            groups = dict(of_megatron(layout))
        except (AssertionError, ValueError, RuntimeError) as error:
            if not problems:
                pytest.fail(f"only Megatron refuses {layout.name} of {shape.family}: {error}")
            refused_by_both += 1
            continue
        assert all(problem.field.startswith("policy.layout.") and problem.fix for problem in problems)
        if problems:
            continue
        accepted += 1
        assert {len(group) for group in groups["dp"]} == {layout.data_parallel_size}
        assert_groups_agree(layout)
        assert_layers_agree(shape, layout, config)
        assert policy_memory(experiment, shape).on_device > 0
        assert all(sent >= 0 for sent in sent_elements(shape, layout).values())
    assert accepted > NUM_DRAWN / 10
    assert refused_by_both > NUM_DRAWN / 20
