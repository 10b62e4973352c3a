"""The list of layouts against an enumeration of all sizes, and its order."""

import itertools
import math
from dataclasses import replace

import pytest

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout_rules import layout_problems
from nemorl.models.registry import shape_from_config
from nemorl.models.shape import MlaShape
from nemorl.plan.layouts import LayoutChoice, list_layouts
from tests.plan.conftest import Configure
from tests.plan.models import CONFIG

SHAPE = shape_from_config(CONFIG, "config.json")
EXPERTS = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
AXES = {
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "virtual_pipeline_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "data_parallel_size": "DP",
}


def choices(
    configure: Configure, num_devices: int, *overrides: str, memory: int | None = None
) -> list[LayoutChoice]:
    return list_layouts(configure(*overrides), SHAPE, num_devices, memory)


@pytest.mark.parametrize("num_devices", [1, 4, 6])
def test_every_valid_layout_is_there_once(configure: Configure, num_devices: int) -> None:
    """32 trajectories a step: DP of 3 and 6 are out."""
    wanted = set()
    for sizes in itertools.product(range(1, num_devices + 1), repeat=5):
        tensor, stages, _, context, data = sizes
        layout = LayoutConfig(sequence_parallel=tensor > 1, **dict(zip(AXES, sizes, strict=True)))
        if math.prod((tensor, stages, context, data)) == num_devices and 32 % data == 0:
            wanted |= {layout.name} if not any(layout_problems(SHAPE, layout)) else set()
    found = [choice.layout.name for choice in choices(configure, num_devices)]
    assert len(found) == len(set(found))
    assert set(found) == wanted


def test_what_fits_comes_first_then_small_copies_then_few_bytes(configure: Configure) -> None:
    listed = choices(configure, 4)
    whole = max(choice.memory.on_device for choice in listed)
    limit = sorted(choice.memory.on_device for choice in listed)[len(listed) // 2]
    assert all(choice.fits is None for choice in listed)
    assert [choice.layout.name for choice in listed][:4] == ["DP4", "PP2 DP2", "CP2 DP2", "PP2 VPP3 DP2"]

    limited = choices(configure, 4, memory=limit)
    fitting = [choice.fits for choice in limited]
    assert fitting == sorted(fitting, reverse=True)
    assert 0 < sum(map(bool, fitting)) < len(fitting)
    assert all(choice.fits for choice in choices(configure, 4, memory=whole))


def test_bytes_of_each_axis_written_out(configure: Configure) -> None:
    """Hidden 128, keys and values 2 x 4 x 16, 6 layers, float32."""
    by_name = {choice.layout.name: choice.bytes_per_token for choice in choices(configure, 2)}
    assert by_name == {
        "DP2": 0,
        "TP2-SP": 6 * 8 * 128 // 2 * 4,
        "CP2": 6 * 2 * 128 // 2 * 4,
        "PP2": 2 * 128 * 4,
        "PP2 VPP3": 3 * 2 * 128 * 4,
    }


def test_bytes_of_combined_axes_written_out(configure: Configure) -> None:
    """Ranks of CP send for half of the tokens, ranks of TP a half of each; stages have three layers."""
    by_name = {choice.layout.name: choice.bytes_per_token for choice in choices(configure, 4)}
    assert by_name["TP2-SP CP2"] == (6 * 8 * 128 // 2 // 2 + 6 * 2 * 128 // 2 // 2) * 4
    assert by_name["TP2-SP PP2"] == (3 * 8 * 128 // 2 + 2 * 128 // 2) * 4
    assert by_name["PP2 CP2"] == (3 * 2 * 128 // 2 + 2 * 128 // 2) * 4


@pytest.mark.parametrize(
    ("num_devices", "name", "elements"),
    [
        # Two experts of a token, 128 numbers there and back, forward and backward, in each of six layers.
        (2, "DP2 EP2", 6 * 4 * 2 * 128 // 2),
        (2, "DP2 ETP2", 6 * 4 * (2 * 2) * 128 // 2),
        # Keys and values of 4 heads of 128, the family's usual size.
        (2, "CP2 EP2", 6 * 2 * (2 * 4 * 128) // 2 + 6 * 4 * 2 * 128 // 2 // 2),
        (2, "TP2-SP EP2", 6 * 8 * 128 // 2 + 6 * 4 * 2 * 128 // 2 // 2),
        (4, "PP2 DP2 EP2", 3 * 4 * 2 * 128 // 2 + 2 * 128),
        (4, "DP4 EP2 ETP2", 6 * 4 * (2 * 2) * 128 * 3 // 4),
    ],
)
def test_bytes_to_experts_and_back_written_out(
    configure: Configure, num_devices: int, name: str, elements: int
) -> None:
    shape = shape_from_config(EXPERTS, "config.json")
    by_name = {c.layout.name: c.bytes_per_token for c in list_layouts(configure(), shape, num_devices, None)}
    assert by_name[name] == elements * 4


def test_latent_attention_gathers_keys_and_values_of_all_heads(configure: Configure) -> None:
    """8 heads, with keys of 8 and 4 rotary channels and values of 6."""
    mla = MlaShape(query_rank=None, key_value_rank=9, head_dim=8, rotary_dim=4, value_dim=6)
    listed = list_layouts(configure(), replace(SHAPE, mla=mla), 2, None)
    by_name = {choice.layout.name: choice.bytes_per_token for choice in listed}
    assert by_name["CP2"] == 6 * 2 * 8 * (8 + 4 + 6) // 2 * 4


def test_stages_wait_less_with_more_runs_of_layers(configure: Configure) -> None:
    """Stages less one, in micro-batches of a stage: of four each, and a run is a part of its layers."""
    idle = {choice.layout.name: choice.idle for choice in choices(configure, 2)}
    assert idle == {"DP2": 0, "TP2-SP": 0, "CP2": 0, "PP2": 1 / (1 + 8), "PP2 VPP3": 1 / (1 + 24)}
    idle = {choice.layout.name: choice.idle for choice in choices(configure, 3)}
    assert (idle["PP3"], idle["PP3 VPP2"]) == (2 / (2 + 12), 2 / (2 + 24))


@pytest.mark.parametrize(
    ("tokens", "context_sizes"), [(1, {1}), (3, {1}), (4, {1, 2}), (7, {1, 2}), (8, {1, 2, 4})]
)
def test_context_ranks_have_two_tokens_at_least(
    configure: Configure, tokens: int, context_sizes: set[int]
) -> None:
    experiment = configure()
    policy = experiment.policy.model_copy(update={"max_sequence_length": tokens})
    listed = list_layouts(experiment.model_copy(update={"policy": policy}), SHAPE, 4, None)
    assert {choice.layout.context_parallel_size for choice in listed} == context_sizes


def test_adapters_leave_key_value_heads_whole(configure: Configure) -> None:
    """Four key-value heads."""
    lora = "policy.lora={rank: 4, alpha: 8, targets: [q_proj]}"
    assert "TP8-SP" in {choice.layout.name for choice in choices(configure, 8)}
    names = {choice.layout.name for choice in choices(configure, 8, lora)}
    assert "TP8-SP" not in names
    assert "TP4-SP DP2" in names


def test_experts_are_laid_over_the_processes_of_a_stage(configure: Configure) -> None:
    shape = shape_from_config(EXPERTS, "config.json")
    names = {choice.layout.name for choice in list_layouts(configure(), shape, 2, None)}
    stage_of_two = {
        f"{axis}{experts}" for axis in ("DP2", "CP2", "TP2-SP") for experts in ("", " EP2", " ETP2")
    }
    assert names == stage_of_two | {"PP2", "PP2 VPP3"}


def test_layouts_that_the_batch_does_not_fill_are_left_out(configure: Configure) -> None:
    """Two trajectories: no more than two copies, and interleaved stages for one copy of two stages only."""
    few = ("algorithm.num_prompts_per_step=1", "algorithm.num_generations_per_prompt=2")
    names = {choice.layout.name for choice in choices(configure, 4, *few)}
    assert "DP4" not in names
    assert "PP2 VPP3 DP2" not in names
    assert "PP2 VPP3 CP2" in names
