"""The memory plan of recipes next to their rehearsals (benchmarks/recipes.py); some run again here."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemorl.plan.memory import stage_memory
from nemorl.rehearsal.ranks import compare, faults, planned_parts, rehearse_all
from tests.plan.recipes import FILES, FOLDER, recipe
from tests.selection import in_all

RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "docs" / "results" / "recipes.json").read_text(encoding="utf-8")
)["rows"]
TOLERANCE = 0.05


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row['recipe']} rank {row['rank']}")
def test_the_plan_is_within_a_twentieth_of_what_was_measured(row: dict[str, Any]) -> None:
    one = recipe(FOLDER / f"{row['recipe']}.yaml")
    policy = one.experiment.policy
    assert row["layout"] == policy.layout.name, "rehearse it again: python benchmarks/recipes.py"
    assert row["recompute"] == policy.recompute.described, "rehearse it again: python benchmarks/recipes.py"

    plan = stage_memory(one.experiment, one.shape, row["stage"])

    planned = sum(planned_parts(plan, row["peak_phase"]).values())
    assert planned == pytest.approx(row["peak_bytes"], rel=TOLERANCE)
    assert row["faults"] == 0


def test_all_recipes_were_rehearsed() -> None:
    assert {row["recipe"] for row in RECORDED} == {file.stem for file in FILES}


@pytest.mark.ci
@pytest.mark.parametrize("name", ["grpo-gemma3-1b-1n8g-dp8", *in_all("reward_model-llama3.1-8b-1n8g-tp2dp4")])
def test_rehearsing_a_recipe_again_measures_what_is_recorded(name: str) -> None:
    """Norms and gates of Gemma, and a scalar head."""
    experiment = recipe(FOLDER / f"{name}.yaml").experiment
    (row,) = (row for row in RECORDED if row["recipe"] == name)

    (report,) = rehearse_all(experiment, [row["rank"]])

    assert faults(report) == []
    comparison = compare(report, experiment)
    assert comparison.phase == row["peak_phase"]
    assert comparison.measured == pytest.approx(row["peak_bytes"], rel=0.02)
    assert abs(comparison.difference) < TOLERANCE
