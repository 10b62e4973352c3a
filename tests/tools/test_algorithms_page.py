"""docs/algorithms.md says what the presets and the schema say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from nemorl.config.algorithm.online import PRESETS

TOOL = Path(__file__).parents[2] / "tools" / "algorithms_page.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("algorithms_page", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
