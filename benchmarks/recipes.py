"""Is the memory plan of every recipe right? A rehearsal of each (configs/recipes).

    python benchmarks/recipes.py [--only NAME ...] [--processes N]

A rank of the policy's fullest and of its last pipeline stage, by the plan, runs on the pretended accelerator
at the real size of the model: load, logprobs, a training step, refit and offloading. Critics, teachers and
reward models are not rehearsed. Not run on hardware. Results are written after each rank. With many experts
and long sequences a rank takes a few GB of memory, since the places of tokens are real.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rehearsal import Row, rehearsed_rows, report_rows

from nemorl.config.load import load_experiment

FOLDER = Path(__file__).parents[1] / "configs" / "recipes"
RECIPES = {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}


def _shown(row: Row) -> dict[str, object]:
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


def rows_of(name: str, processes: int) -> Iterator[Row]:
    for row in rehearsed_rows(load_experiment(RECIPES[name]), processes):
        yield {"recipe": name, **row}


def main() -> None:
    cases = {name: partial(rows_of, name) for name in RECIPES}
    report_rows(__doc__.splitlines()[0], cases, "recipes", _shown, key="recipe")


if __name__ == "__main__":
    main()
