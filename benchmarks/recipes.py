"""Is the memory plan of every recipe right? A rehearsal of each (configs/recipes).

    python benchmarks/recipes.py [--only NAME ...] [--processes N]

A rank of the policy's fullest and of its last pipeline stage, by the plan, runs on the pretended accelerator
at the real size of the model: load, logprobs, a training step, refit and offloading. Critics, teachers and
reward models are not rehearsed. Not run on hardware. Results are written after each rank. With many experts
and long sequences a rank takes a few GB of memory, since the places of tokens are real.
"""

from pathlib import Path
from typing import Any

from common import publish, table_of
from rehearsal import begun, rehearsed_rows

from nemorl.config.load import load_experiment

FOLDER = Path(__file__).parents[1] / "configs" / "recipes"
RECIPES = {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}


def _shown(row: dict[str, Any]) -> dict[str, object]:
    return {
        "recipe": row["recipe"],
        "rank": row["rank"],
        "stage": row["stage"],
        "peaks in": row["peak_phase"],
        "peak GB": round(row["peak_bytes"] / 1e9, 1),
        "plan GB": round(row["planned_bytes"] / 1e9, 1),
        "plan is": f"{row['plan_difference']:+.1%}",
        "faults": row["faults"],
    }


def main() -> None:
    arguments, rows = begun(__doc__.splitlines()[0], list(RECIPES), "recipes", "recipe")
    for name in arguments.only:
        for row in rehearsed_rows(load_experiment(RECIPES[name]), arguments.processes):
            rows = sorted([*rows, {"recipe": name, **row}], key=lambda one: (one["recipe"], one["rank"]))
            table = table_of("Peaks, not run on hardware", [_shown(row) for row in rows])
            publish("recipes", {"rows": rows}, table, arguments.out)


if __name__ == "__main__":
    main()
