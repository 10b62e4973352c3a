"""Generate the table of docs/recipes.md from the recipes, by the plans of memory and time.

.venv/bin/python tools/recipes_page.py
"""

import io
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from nemorl.cli import main  # noqa: E402
from tests.plan.recipes import FILES, Recipe, recipe  # noqa: E402

PAGE = ROOT / "docs" / "recipes.md"
REHEARSED = ROOT / "docs" / "results" / "recipes.json"
_BEGIN, _END = "<!-- written by tools/recipes_page.py -->\n", "<!-- end -->\n"
_HEADERS = ("recipe", "memory, GB", "rehearsed", "of", "step, s", "tokens/s", "MFU", "longest stage")


def written(page: str) -> str:
    """The page with its table as recipes and plans are now."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no part for the table")
    return before + begin + "\n".join(_table()) + "\n" + end + after


def _table() -> Iterator[str]:
    yield f"| {' | '.join(_HEADERS)} |"
    yield "|---" * len(_HEADERS) + "|"
    for one in sorted(map(recipe, FILES), key=lambda one: (one.devices, one.name)):
        yield f"| {' | '.join(_row(one))} |"


def _row(one: Recipe) -> tuple[str, ...]:
    policy = next(process for process in one.processes if process.group == "policy")
    step = _planned_time(one)
    of_stages = step["stages"].items()
    stages = {name: sum(v for v in cost.values() if isinstance(v, float)) for name, cost in of_stages}
    seconds, utilization = step["seconds"], step["training_utilization"]
    if not one.experiment.algorithm.online:
        seconds -= stages.pop("other", 0.0)  # fitted to steps that sample
    longest = max(stages, key=lambda name: stages[name])
    peak = _peaks().get(one.name)
    return (
        f"[`{one.name}`](../configs/recipes/{one.name}.yaml)",
        f"{policy.on_device / 1e9:.0f}",
        "-" if peak is None else f"{peak / 1e9:.0f}",
        f"{one.hardware.memory_bytes / 1e9:.0f}",
        f"{seconds:.3g}",
        f"{step['trained_tokens'] / seconds:,.0f}",
        f"{utilization:.0%}",
        f"{longest}, {step['stages'][longest]['bound']}",
    )


def _planned_time(one: Recipe) -> dict[str, Any]:
    """What `nemorl plan time --json` prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = main(["plan", "time", str(one.file), "--hardware", one.hardware.name, "--json"])
    if status:
        raise SystemExit(f"{one.name} cannot be planned")
    planned: dict[str, Any] = json.loads(printed.getvalue())
    return planned


@cache
def _peaks() -> dict[str, int]:
    """The highest peak of the rehearsed ranks of each recipe, in bytes."""
    peaks: dict[str, int] = {}
    for row in json.loads(REHEARSED.read_text(encoding="utf-8"))["rows"] if REHEARSED.exists() else ():
        peaks[row["recipe"]] = max(row["peak_bytes"], peaks.get(row["recipe"], 0))
    return peaks


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
