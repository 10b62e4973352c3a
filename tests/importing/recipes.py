"""Public recipes of other projects as tables of keys and values, with their repository and commit.

A recipe is written as its difference from another one. Chat templates are left out of the values.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from nemorl.importing.rules import Options

FOLDER = Path(__file__).parent / "recipes"
FILES = {"nemo-rl": "nemo_rl.json", "verl": "verl.json"}
# Where a run's length is given in epochs of data that nemorl does not know.
OPTIONS = Options(rows=None, folder=str(FOLDER))
ROWS = 10_000


@cache
def table(project: str) -> dict[str, Any]:
    return json.loads((FOLDER / FILES[project]).read_text(encoding="utf-8"))


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
