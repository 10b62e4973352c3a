"""Public recipes of other projects as tables of keys and values, with their repository and commit.

A recipe is written as its difference from another one. Chat templates are left out of the values.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tables"
FILES = {"nemo-rl": "nemo_rl.json", "verl": "verl.json", "openrlhf": "openrlhf.json"}
ROWS = 10_000  # where a run's length is given in epochs of data that nemorl does not know


@cache
def table(project: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / FILES[project]).read_text(encoding="utf-8"))
    return read


@cache
def recipes(project: str) -> dict[str, dict[str, Any]]:
    """The values of each recipe by their dotted keys."""
    found: dict[str, dict[str, Any]] = {}
    for name, recipe in table(project)["recipes"].items():
        values = dict(found[recipe["from"]]) if "from" in recipe else {}
        for key in recipe.get("without", ()):
            del values[key]
        found[name] = values | recipe["set"]
    return found
