"""The memory plan of recipes next to their rehearsals (benchmarks/recipes.py); some run again here."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemorl.plan.memory import stage_memory
from nemorl.rehearsal.ranks import compare, faults, planned_parts, rehearse_all
from tests.plan.recipes import FILES, FOLDER, recipe

RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "docs" / "results" / "recipes.json").read_text(encoding="utf-8")
)["rows"]
# Of these a rehearsal takes more than 4 GB of the host's memory, or longer than the others together.
NOT_REHEARSED = {
    "dapo-qwen2.5-32b-16n8g-tp4cp2pp4vpp4dp4",
    "grpo-deepseek-v3-128n8g-pp16ep16dp32-async1",
    "grpo-deepseek-v3-32n8g-pp16ep16dp16-h200",
    "grpo-deepseek-v3-64n4g-pp8ep16dp16-async1-gb200",
    "grpo-gpt-oss-120b-16n8g-tp4pp4ep16dp4-async1-tools",
    "grpo-qwen3-235b-a22b-16n8g-tp2cp2pp8ep16dp4",
    "grpo-qwen3-235b-a22b-32n8g-tp4pp8ep16dp4-async1",
    "grpo-qwen3-30b-a3b-16n8g-tp4ep8dp8-async4-terminal",
    "grpo-qwen3-30b-a3b-4n8g-ep8dp32",
    "grpo-qwen3-32b-8n8g-tp4pp4dp2-async1",
    "gspo-deepseek-v3-256n4g-pp8ep32dp32-async2-code-gb200",
    "gspo-gpt-oss-20b-1n8g-cp2ep4dp4-code-h200",
    "gspo-mixtral-8x7b-4n8g-pp8vpp4ep4dp4",
    "gspo-qwen3-235b-a22b-128n8g-cp2pp2ep16dp32-async4-h200",
    "gspo-qwen3-235b-a22b-32n8g-tp2cp2pp4ep16dp16-b200",
    "gspo-qwen3-30b-a3b-1n8g-ep8dp8-h200",
    "gspo-qwen3-30b-a3b-4n4g-ep16dp16-gb200",
    "sft-qwen3-8b-1n1g-dp1-lora",
}
TOLERANCE = 0.1


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row['recipe']} rank {row['rank']}")
def test_the_plan_is_within_a_tenth_of_what_was_measured(row: dict[str, Any]) -> None:
    one = recipe(FOLDER / f"{row['recipe']}.yaml")
    policy = one.experiment.policy
    assert row["layout"] == policy.layout.name, "rehearse it again: python benchmarks/recipes.py"
    assert row["recompute"] == policy.recompute.described, "rehearse it again: python benchmarks/recipes.py"

    plan = stage_memory(one.experiment, one.shape, row["stage"])

    planned = sum(planned_parts(plan, row["peak_phase"]).values())
    assert planned == pytest.approx(row["peak_bytes"], rel=TOLERANCE)
    assert row["faults"] == 0


def test_what_was_not_rehearsed_is_listed() -> None:
    assert {file.stem for file in FILES} - {row["recipe"] for row in RECORDED} == NOT_REHEARSED


@pytest.mark.ci
@pytest.mark.parametrize("name", ["grpo-gemma3-1b-1n8g-dp8", "reward_model-llama3.1-8b-1n8g-tp2dp4"])
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
