"""The deny list of words finds identifiers, comments, strings and Markdown, and nothing else."""

from pathlib import Path

import pytest

from tests.scripts import load_script

words = load_script("tools/words.py")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("def whereabouts(): ...", ["whereabouts"]),
        ("is_told_by = 1", ["told"]),
        ("class TornFile: ...", ["Torn"]),
        ('raise ValueError("an integer is wanted")', ["wanted"]),
        ("x = 1  # begins anew", ["anew"]),
        ("stand_in = standalone = 1  # a stand-in", []),
        ("import told  # words: allow", []),
        ("understanding = wanton = unfigured = 1", []),
        ("plot: go.Figure = go.Figure()", []),
        ("plot: Figure = Figure.of(go)", ["Figure", "Figure"]),
    ],
)
def test_denied_words_of_python(tmp_path: Path, line: str, found: list[str]) -> None:
    file = tmp_path / "a.py"
    file.write_text(f'"""Docstring."""\n\n{line}\n', encoding="utf-8")

    assert [(one.line, one.word) for one in words.search(file)] == [(3, word) for word in found]


def test_strings_of_tests_are_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("tests/test_a.py")
    file.parent.mkdir()
    lines = [
        "def test_it_is_told(told):",
        '    """Begins',
        '    anew."""',
        '    assert str(told) == "told"  # as told',
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    found = sorted((one.line, one.word) for one in words.search(file))
    assert found == [(1, "told"), (3, "anew"), (4, "told")]


def test_markdown_is_searched_line_by_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A sentence.\nThe behaviour of a run that goes on.\n", encoding="utf-8")

    assert [(one.line, one.word, one.better) for one in words.search(page)] == [
        (2, "behaviour", "US spelling"),
        (2, "goes on", "continues"),
    ]
