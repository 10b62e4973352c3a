"""docs/families.md says what the code does."""

import re
from pathlib import Path

from nemorl.models.registry import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")


def test_every_architecture_is_in_the_table() -> None:
    rows = [line.split("|")[2].strip() for line in PAGE.splitlines() if line.count("|") == 5]
    listed = {name for row in rows for name in re.findall(r"`(\w+ForCausalLM)`", row)}
    assert listed == {name for family in FAMILIES for name in family.architectures}


def test_the_worked_example_is_the_file() -> None:
    assert (ROOT / "nemorl" / "models" / "mistral.py").read_text(encoding="utf-8") in PAGE
