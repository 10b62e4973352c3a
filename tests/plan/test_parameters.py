"""Counted parameters against the slices of every rank, of tiny models of all families."""

from dataclasses import replace

import pytest
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout import PolicyRank, hf_tensors, policy_slices
from nemorl.models.registry import shape_from_config
from nemorl.models.shape import ModelShape
from nemorl.plan.memory import Parameters, stage_parameters
from tests.models.tiny_models import CONFIGS

LAYOUTS = {
    "one": LayoutConfig(),
    "TP2": LayoutConfig(tensor_parallel_size=2),
    "PP2-uneven": LayoutConfig(pipeline_parallel_size=2, layers_in_first_stage=1),
    "PP2-VPP2": LayoutConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_those_of_the_slices(name: str, layout: LayoutConfig) -> None:
    shape = shape_of(name)
    for stage in range(layout.pipeline_parallel_size):
        slices = policy_slices(shape, PolicyRank(layout, pp_rank=stage))
        # 101 tokens over two ranks: the first has no row of padding.
        total = stage_parameters(shape, layout, stage).total
        assert total == sum(part.num_elements for part in slices)
        assert isinstance(total, int)
        assert all(part.num_elements for part in slices)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "deepseek-v3"])
def test_layers_for_further_tokens_count_in_the_last_stage(
    name: str, tied: bool, layout: LayoutConfig
) -> None:
    fields = CONFIGS[name].to_dict() | {"num_nextn_predict_layers": 2, "tie_word_embeddings": tied}
    architecture = "MiMoForCausalLM" if name == "qwen2" else "DeepseekV3ForCausalLM"
    shape = shape_from_config(fields | {"architectures": [architecture]}, "", with_mtp=True)
    last = layout.pipeline_parallel_size - 1
    for stage in range(layout.pipeline_parallel_size):
        slices = policy_slices(shape, PolicyRank(layout, pp_rank=stage))
        assert stage_parameters(shape, layout, stage).total == sum(part.num_elements for part in slices)
        assert any("mtp.layers.1." in part.param for part in slices) == (stage == last)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "moe" in name or name == "gpt-oss"])
def test_experts_are_divided_by_their_own_axes(name: str) -> None:
    shape = shape_of(name)
    layout = LayoutConfig(data_parallel_size=4, expert_parallel_size=2)
    whole, part = stage_parameters(shape, LayoutConfig(), 0), stage_parameters(shape, layout, 0)
    assert (part.dense, part.experts) == (whole.dense, whole.experts // 2)
    slices = policy_slices(shape, PolicyRank(layout))
    assert part.total == sum(slice_.num_elements for slice_ in slices)
    assert isinstance(part.total, int)


def test_matrices_that_are_stored_by_columns_are_read_by_columns() -> None:
    """gpt-oss stores its experts' matrices as [experts, in, out]; the parameter is [out, in]."""
    shape = shape_of("gpt-oss")
    assert shape.moe is not None
    name = "model.layers.0.mlp.experts.down_proj"
    found = [part for part in policy_slices(shape, PolicyRank()) if part.name == name]
    assert [part.start for part in found] == [(expert, 0, 0) for expert in range(shape.moe.num_experts)]
    assert {part.strides[1:] for part in found} == {(1, shape.moe.ffn_hidden_size)}


def test_a_scalar_head_is_one_row_in_place_of_the_vocabulary() -> None:
    shape = shape_of("llama")
    tensors = hf_tensors(shape)
    assert tensors.pop("lm_head.weight") == (101, shape.hidden_size)
    assert hf_tensors(replace(shape, head="scalar")) == tensors | {"score.weight": (1, shape.hidden_size)}


def test_state_is_spread_over_the_ranks_that_hold_the_same() -> None:
    """Eight processes of a stage: 4 copies of the dense weights under TP2, 2 of the experts under EP4."""
    layout = LayoutConfig(
        tensor_parallel_size=2, context_parallel_size=2, data_parallel_size=2, expert_parallel_size=4
    )
    assert Parameters(dense=800, experts=600).per_copy(layout) == 800 // 4 + 600 // 2
    halves = layout.model_copy(update={"expert_parallel_size": 2, "expert_tensor_parallel_size": 2})
    assert Parameters(dense=801, experts=601).per_copy(halves) == 200 + 300


def shape_of(name: str) -> ModelShape:
    config = CONFIGS[name]
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    return shape_from_config({**config.to_dict(), "architectures": [architecture]}, name)
