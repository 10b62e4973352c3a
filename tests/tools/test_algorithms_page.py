"""docs/algorithms.md says what the presets and the schema say."""

from types import ModuleType

import pytest

from nemorl.config.algorithm.online import PRESETS
from tests.scripts import load_script


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script("tools/algorithms_page.py")


def test_the_page_is_up_to_date(tool: ModuleType) -> None:
    page = tool.PAGE.read_text(encoding="utf-8")
    assert tool.written(page) == page, "presets or fields have changed: run python tools/algorithms_page.py"
    assert not [line for line in page.splitlines() if line.endswith((":", ": ")) and "- `" in line], "no help"


def test_every_preset_has_a_section_with_its_settings(tool: ModuleType) -> None:
    page = tool.PAGE.read_text(encoding="utf-8")
    for name, preset in PRESETS.items():
        (section,) = [part for part in page.split("\n### ") if part.partition("\n")[0] == name]
        assert f"  name: {name}\n" in section
        assert f"]({preset.paper})" in section
        assert preset.paper.startswith("https://")
        assert preset.title in section
        assert "TODO" not in section, "its description"
