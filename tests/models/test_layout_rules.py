"""Every rule of layouts: what it refuses, which field it names and what it lets through."""

from dataclasses import replace

import pytest

from nemorl.config.policy import FullRecompute, LayoutConfig, SelectiveRecompute
from nemorl.models.layout import stage_layers
from nemorl.models.layout_rules import (
    layers_by_stage,
    layout_problems,
    norms_are_fused,
    recompute_problems,
    with_fewer_copies,
)
from nemorl.models.shape import MlaShape, ModelShape, MoeShape, Rope

DENSE = ModelShape(
    family="llama",
    num_layers=12,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    vocab_size=100,
    tied_embeddings=False,
    rope=Rope(1e4),
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_ids=(),
    torch_dtype="float32",
)
EXPERTS = replace(DENSE, moe=MoeShape(num_experts=8, top_k=2, ffn_hidden_size=24))
LATENT = replace(
    DENSE, mla=MlaShape(query_rank=None, key_value_rank=9, head_dim=8, rotary_dim=4, value_dim=8)
)


@pytest.mark.parametrize(("ranks", "copies"), [(11, 3), (6, 3), (5, 2), (3, 1), (1, None)])
def test_a_layout_for_fewer_ranks_has_copies_that_divide_the_same_batches(
    ranks: int, copies: int | None
) -> None:
    present = layout(tensor_parallel_size=2, data_parallel_size=6)
    smaller = with_fewer_copies(DENSE, present, ranks)
    assert smaller == (copies and layout(tensor_parallel_size=2, data_parallel_size=copies))


def test_experts_may_need_all_copies() -> None:
    assert with_fewer_copies(EXPERTS, layout(data_parallel_size=4, expert_parallel_size=4), 3) is None
    smaller = with_fewer_copies(EXPERTS, layout(data_parallel_size=4, expert_parallel_size=2), 3)
    assert smaller == layout(data_parallel_size=2, expert_parallel_size=2)


def layout(**sizes: int | bool | None) -> LayoutConfig:
    return LayoutConfig(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "sizes", "field", "fix"),
    [
        (DENSE, {"tensor_parallel_size": 3}, "tensor_parallel_size", "8 attention heads: 1, 2, 4, 8 do"),
        (
            replace(DENSE, num_attention_heads=12),
            {"tensor_parallel_size": 6},
            "tensor_parallel_size",
            "4 key-value heads, or be a multiple",
        ),
        (
            replace(DENSE, ffn_hidden_size=98),
            {"tensor_parallel_size": 4},
            "tensor_parallel_size",
            "98 columns of the MLP",
        ),
        (
            LATENT,
            {"tensor_parallel_size": 2},
            "tensor_parallel_size",
            "13 rows of the compressed key and value",
        ),
        (DENSE, {"sequence_parallel": True}, "sequence_parallel", "set this to false"),
        (DENSE, {"pipeline_parallel_size": 5}, "pipeline_parallel_size", "12 layers: 1, 2, 3, 4, 6, 12 do"),
        (DENSE, {"layers_in_first_stage": 12}, "layers_in_first_stage", "there is one stage"),
        (DENSE, {"virtual_pipeline_parallel_size": 2}, "virtual_pipeline_parallel_size", "set this to 1"),
        (
            DENSE,
            {"pipeline_parallel_size": 2, "layers_in_first_stage": 3, "layers_in_last_stage": 3},
            "layers_in_last_stage",
            "together must have the model's 12 layers",
        ),
        (
            DENSE,
            {"pipeline_parallel_size": 4, "layers_in_first_stage": 10},
            "layers_in_first_stage",
            "leaves 2 of the 12 layers for 3 stages",
        ),
        (
            DENSE,
            {"pipeline_parallel_size": 4, "layers_in_last_stage": 1},
            "pipeline_parallel_size",
            "the other 3 stages share the 11 layers",
        ),
        (
            DENSE,
            {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 4},
            "virtual_pipeline_parallel_size",
            "must divide the 6 layers of every stage",
        ),
        (
            DENSE,
            {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2, "layers_in_first_stage": 5},
            "virtual_pipeline_parallel_size",
            "must divide the 5 and the 7 layers of every stage",
        ),
        (
            DENSE,
            {"expert_parallel_size": 2, "data_parallel_size": 2},
            "expert_parallel_size",
            "has no experts",
        ),
        (EXPERTS, {"tensor_parallel_size": 2}, "sequence_parallel", "has to be true"),
        (EXPERTS, {"expert_parallel_size": 3, "data_parallel_size": 3}, "expert_parallel_size", "8 experts"),
        (EXPERTS, {"expert_parallel_size": 2}, "expert_parallel_size", "2 (EP x ETP) does not divide 1"),
        (
            EXPERTS,
            {"expert_tensor_parallel_size": 5, "data_parallel_size": 5, "context_parallel_size": 1},
            "expert_tensor_parallel_size",
            "24 columns of an expert",
        ),
        (
            EXPERTS,
            {"expert_tensor_parallel_size": 2},
            "expert_tensor_parallel_size",
            "2 (EP x ETP) does not divide 1",
        ),
        (
            replace(EXPERTS, linear_bias=True),
            {"expert_tensor_parallel_size": 2, "context_parallel_size": 2},
            "expert_tensor_parallel_size",
            "biases of experts",
        ),
        (
            replace(DENSE, ffn_hidden_size=130),
            {"tensor_parallel_size": 4},
            "tensor_parallel_size",
            "130 columns of the MLP: 1, 2, 5, 10, 13, 26 do",  # divisors up to 64
        ),
    ],
)
def test_a_rule_names_field_and_fix(
    shape: ModelShape, sizes: dict[str, int | bool], field: str, fix: str
) -> None:
    wanted = layout(**sizes)
    found = [v for v in layout_problems(shape, wanted) if v.field == f"policy.layout.{field}"]
    assert {v.value for v in found} == {getattr(wanted, field)}
    assert any(fix in v.fix for v in found), found


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (DENSE, {"tensor_parallel_size": 4, "sequence_parallel": True, "context_parallel_size": 3}),
        (DENSE, {"pipeline_parallel_size": 3, "virtual_pipeline_parallel_size": 4, "data_parallel_size": 5}),
        (DENSE, {"pipeline_parallel_size": 4, "layers_in_first_stage": 2, "layers_in_last_stage": 2}),
        (DENSE, {"pipeline_parallel_size": 2, "layers_in_first_stage": 5, "layers_in_last_stage": 7}),
        (EXPERTS, {"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 2}),
        (EXPERTS, {"context_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": 4}),
        (
            EXPERTS,
            {"tensor_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2},
        ),
        (EXPERTS, {"expert_tensor_parallel_size": 2, "data_parallel_size": 2}),
        (
            EXPERTS,
            {"expert_tensor_parallel_size": 2, "expert_parallel_size": 2, "data_parallel_size": 4},
        ),
        # Only a layout that divides experts has to divide their biases.
        (replace(EXPERTS, linear_bias=True), {"expert_parallel_size": 2, "data_parallel_size": 2}),
        # Every layer has experts: nothing has the columns of the MLP.
        (replace(EXPERTS, ffn_hidden_size=97), {"tensor_parallel_size": 2, "sequence_parallel": True}),
        (
            DENSE,
            {
                "pipeline_parallel_size": 2,
                "virtual_pipeline_parallel_size": 2,
                "layers_in_first_stage": 4,
                "layers_in_last_stage": 8,
            },
        ),
    ],
)
def test_what_can_run_is_let_through(shape: ModelShape, sizes: dict[str, int | bool]) -> None:
    assert list(layout_problems(shape, layout(**sizes))) == []


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"pipeline_parallel_size": 3, "layers_in_first_stage": 15}, "layers_in_first_stage"),
        ({"pipeline_parallel_size": 3, "layers_in_first_stage": 3}, "pipeline_parallel_size"),
        (
            {"pipeline_parallel_size": 2, "layers_in_first_stage": 5, "layers_in_last_stage": 7},
            "virtual_pipeline_parallel_size",
        ),
    ],
)
def test_interleaving_is_checked_only_for_stages_that_add_up(sizes: dict[str, int], field: str) -> None:
    """12 layers, two runs in a stage: stages that do not add up have one problem."""
    (problem,) = layout_problems(DENSE, layout(virtual_pipeline_parallel_size=2, **sizes))
    assert problem.field == f"policy.layout.{field}"


def test_key_value_heads_may_be_divided_but_not_under_adapters() -> None:
    wanted = layout(tensor_parallel_size=8)
    assert list(layout_problems(DENSE, wanted)) == []
    (problem,) = layout_problems(DENSE, wanted, adapters=True)
    assert "adapters require complete heads" in problem.fix
    assert list(layout_problems(DENSE, layout(tensor_parallel_size=4), adapters=True)) == []


@pytest.mark.parametrize(
    ("shape", "recompute", "field", "fix"),
    [
        (DENSE, FullRecompute(name="full", num_layers=4), "num_layers", "must divide the 2 and 5 layers"),
        (DENSE, FullRecompute(name="full", method="block", num_layers=6), "num_layers", "take 5 or fewer"),
        (DENSE, SelectiveRecompute(name="selective", modules=("moe",)), "modules", "has not experts"),
        (EXPERTS, SelectiveRecompute(name="selective", modules=("mlp",)), "modules", "without experts"),
        (
            EXPERTS,
            SelectiveRecompute(name="selective", modules=("shared_experts",)),
            "modules",
            "has not shared experts",
        ),
        (
            DENSE,
            SelectiveRecompute(name="selective", modules=("core_attn", "mla_up_proj")),
            "modules",
            "has not latent attention: remove mla_up_proj",
        ),
    ],
)
def test_recomputation_that_cannot_be(
    shape: ModelShape, recompute: FullRecompute | SelectiveRecompute, field: str, fix: str
) -> None:
    """Stages of 2, 5 and 5 layers."""
    stages = layout(pipeline_parallel_size=3, layers_in_first_stage=2)
    (problem,) = recompute_problems(shape, stages, recompute)
    assert problem.field == f"policy.recompute.{field}"
    assert fix in problem.fix


@pytest.mark.parametrize(
    "recompute",
    [
        FullRecompute(name="full", method="block", num_layers=5),  # as many as the largest stage has
        FullRecompute(name="full", method="block", num_layers=4),  # only `uniform` has to divide
        FullRecompute(name="full", method="uniform", num_layers=1),
    ],
)
def test_recomputation_that_fits(recompute: FullRecompute) -> None:
    """Stages of 2, 5 and 5 layers."""
    stages = layout(pipeline_parallel_size=3, layers_in_first_stage=2)
    assert list(recompute_problems(DENSE, stages, recompute)) == []


@pytest.mark.parametrize(
    ("runs", "fix"),
    [
        (1, "there are only 6 layers of a stage: take 6 or fewer"),
        (2, "there are only 3 layers of a stage run: take 3 or fewer"),
        (3, "there are only 2 layers of a stage run: take 2 or fewer"),
    ],
)
def test_recomputation_counts_the_layers_of_a_run(runs: int, fix: str) -> None:
    """Two equal stages of 12 layers."""
    stages = layout(pipeline_parallel_size=2, virtual_pipeline_parallel_size=runs)
    recompute = FullRecompute(name="full", num_layers=7)
    (problem,) = recompute_problems(DENSE, stages, recompute)
    assert (problem.value, problem.fix) == (7, fix)
    assert list(recompute_problems(DENSE, stages, FullRecompute(name="full", num_layers=6 // runs))) == []


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ({"pipeline_parallel_size": 3, "layers_in_last_stage": 6}, [3, 3, 6]),
        ({"pipeline_parallel_size": 3, "layers_in_first_stage": 2}, [2, 5, 5]),
        ({"pipeline_parallel_size": 2, "layers_in_first_stage": 5, "layers_in_last_stage": 7}, [5, 7]),
    ],
)
def test_other_stages_share_what_the_first_and_last_leave(sizes: dict[str, int], layers: list[int]) -> None:
    assert layers_by_stage(12, layout(**sizes)) == layers


def test_only_dense_attention_and_mlp_have_all_norms_fused() -> None:
    """Latents and routers have norms of their own."""
    assert norms_are_fused(DENSE)
    assert not norms_are_fused(EXPERTS)
    assert not norms_are_fused(LATENT)
    assert not norms_are_fused(replace(LATENT, moe=EXPERTS.moe))


def test_layers_of_uneven_and_interleaved_stages_follow_one_another() -> None:
    """Megatron's order: the first runs of all stages, then the second runs."""
    uneven = layout(pipeline_parallel_size=3, virtual_pipeline_parallel_size=2, layers_in_first_stage=4)
    runs = [list(stage_layers(12, uneven, stage, chunk)) for chunk in (0, 1) for stage in (0, 1, 2)]
    assert runs == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    last = layout(pipeline_parallel_size=3, virtual_pipeline_parallel_size=2, layers_in_last_stage=4)
    assert [list(stage_layers(12, last, stage, 1)) for stage in (0, 1, 2)] == [[6, 7], [8, 9], [10, 11]]
    two = layout(pipeline_parallel_size=2, layers_in_first_stage=2)
    assert [list(stage_layers(5, two, stage)) for stage in (0, 1)] == [[0, 1], [2, 3, 4]]
