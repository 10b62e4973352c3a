"""The refit benchmark of large models: its bounds, and a small case with the real plan and driver."""

from dataclasses import replace

import pytest
from refit_links import Links
from refit_models import MOE
from refit_scale import CASES, RANKS, Case, bound_seconds, link_seconds, measure, shape_of

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout_rules import division_problems
from nemorl.models.slices import TensorSlice
from nemorl.weights.messages import ReceiverLayout
from tests.weights.layouts import part, whole

LINKS = replace(Links(), nic_rate=10.0)


def receiver(node: str, *slices: TensorSlice) -> ReceiverLayout:
    return ReceiverLayout(slices, ("bfloat16",) * len(slices), node)


def test_bounds_are_of_a_rank_and_of_a_machine() -> None:
    """Two ranks of a machine require the same 200 bytes, and 100 others each; a third rank is alone."""
    attention = whole("attention", (100,))
    experts = [part("experts", (2, 50), (rank, 0), (1, 50), "p") for rank in range(2)]
    receivers = [receiver("a", attention, expert) for expert in experts]
    assert link_seconds(receivers, LINKS) == pytest.approx(300 / 10)
    assert bound_seconds(receivers, LINKS) == pytest.approx((200 + 2 * 100) / 20)
    assert bound_seconds(receivers, replace(LINKS, ranks_per_nic=2)) == pytest.approx(400 / 10)
    alone = [*receivers, receiver("b", attention, experts[0])]
    assert bound_seconds(alone, LINKS) == pytest.approx(300 / 10)


def test_a_small_model_with_experts() -> None:
    case = Case(
        "small",
        MOE | {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512, "moe_intermediate_size": 64},
        LayoutConfig(tensor_parallel_size=2, pipeline_parallel_size=2, expert_parallel_size=2),
        LayoutConfig(data_parallel_size=2, expert_parallel_size=2),
    )
    row = measure(case, 16, Links())
    assert (row["senders"], row["receivers"]) == (16, 8)
    assert row["bound_seconds"] < row["bytes_over_link_seconds"]
    assert row["bound_seconds"] < row["refit_seconds"]
    # everything but what rank 0's machine holds, which is the first stage, and then all of it
    assert row["gather_seconds"] > 0.3 * row["model_gigabytes"] * 1e9 / Links().nic_rate
    assert row["broadcast_seconds"] > row["model_gigabytes"] * 1e9 / Links().nic_rate
    assert row["received_gigabytes"] * 1e9 == 8 * row["receiver_gigabytes"] * 1e9
    assert row["plan_cpu_seconds"] > 0
    assert row["commit_cpu_seconds"] > 0
    assert row["buckets_of_a_receiver"] * 8 >= row["buckets"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layouts_divide_the_models_and_fill_all_ranks(case: Case) -> None:
    shape = shape_of(case.config)
    for count in RANKS:
        assert count % case.policy.world_size == 0
        assert count // 2 % case.engine.world_size == 0
        copies = {"data_parallel_size": count // case.policy.world_size}
        assert list(division_problems(shape, case.policy.model_copy(update=copies))) == []
    assert list(division_problems(shape, case.engine)) == []
