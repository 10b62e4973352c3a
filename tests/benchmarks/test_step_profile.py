"""The profile of a training step: each operator counts for one group, and groups are those of the code."""

from pathlib import Path

import pytest
from step_profile import MODULES, measure_cpu
from training import random_model


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder: Path = tmp_path_factory.mktemp("model")
    random_model(folder, 1)
    found = measure_cpu(folder, threads=1, rounds=1)
    assert sum(row["percent"] for row in found) == pytest.approx(100)
    return {row["group"]: row["operators_percent"] for row in found}


def test_every_group_of_the_step_is_found(rows: dict[str, dict[str, float]]) -> None:
    groups = {"matrix products", "rotary", "head and loss", "optimizer", "gradients", "packing", "host"}
    assert rows.keys() >= groups | set(MODULES.values())


def test_operators_of_both_passes_count_for_the_module_that_called_them(
    rows: dict[str, dict[str, float]],
) -> None:
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert {attention, f"{attention}_backward"} <= rows["attention"].keys()
    assert {"aten::silu", "aten::silu_backward"} <= rows["activations"].keys()
    assert "aten::_fused_adamw_" in rows["optimizer"]
    assert set(rows["matrix products"]) <= {"aten::mm", "aten::addmm_", "aten::bmm", "aten::addmm"}
