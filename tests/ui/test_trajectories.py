"""The table of trajectories, against rows that plain Python filters and sorts, and on corrupt files."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemorl.observe.index import COLUMNS, IndexWriter, TrajectoryIndex, TrajectoryRow
from nemorl.ui.errors import UiError
from nemorl.ui.trajectories import Query, Row, Series, Tables, TrajectoryTable
from tests.observe.examples import make_sample
from tests.ui.stored_runs import make_run, write_samples


def written(number: int) -> TrajectoryRow:
    """Rows with equal values among them, and unknown ones."""
    return TrajectoryRow(
        step=number // 10,
        phase="training" if number % 10 else "validation",
        group=number // 2,
        sample=number % 2,
        task=number % 3,
        turns=1,
        tokens=number % 5,
        sampled=1,
        reward=(number * 7 % 11) / 10,
        stop=("stop", "length", "error")[number % 3],
        min_version=0,
        max_version=0,
        seconds_generation=0.1,
        seconds_environment=0.0,
        failed=number % 3 == 2,
        advantage=math.nan if number % 4 == 0 else number / 8,
        rewards={"format": float(number % 2), "long-name": 1.0},
    )


ROWS = [written(number) for number in range(60)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    IndexWriter(tmp_path / "run" / "trajectories").append(ROWS)
    return tmp_path / "run"


@pytest.fixture
def table(run: Path) -> TrajectoryTable:
    return Tables().open(run)


def numbers(rows: list[Row]) -> list[int]:
    return [row["row"] for row in rows]


def test_pages_are_those_of_the_filtered_and_sorted_rows(table: TrajectoryTable) -> None:
    query = Query("rewards.format == 1 and stop != 'stop'", "tokens", descending=True)
    left = [n for n, row in enumerate(ROWS) if row.rewards["format"] == 1 and row.stop != "stop"]
    left.sort(key=lambda n: -ROWS[n].tokens)  # stable, as the table

    first, second = table.page(query, 0, 8), table.page(query, 8, 100)

    assert numbers([*first.rows, *second.rows]) == left
    assert (first.matching, first.total) == (len(left), 60)
    row = first.rows[0]
    source = ROWS[left[0]]
    assert (row["stop"], row["phase"], row["failed"]) == (source.stop, source.phase, source.failed)
    assert row["rewards.format"] == 1
    assert table.page(query, 1000, 10).rows == []


@pytest.mark.parametrize("descending", [False, True])
def test_unknown_numbers_are_last_in_both_directions(table: TrajectoryTable, descending: bool) -> None:
    listed = table.page(Query(sort="advantage", descending=descending), 0, 100).rows
    values = [row["advantage"] for row in listed]
    assert all(math.isnan(value) for value in values[45:])
    assert values[:45] == sorted(values[:45], reverse=descending)


def test_texts_sort_by_the_alphabet_and_no_column_keeps_the_order(table: TrajectoryTable) -> None:
    stops = [row["stop"] for row in table.page(Query(sort="stop"), 0, 60).rows]
    assert stops == ["error"] * 20 + ["length"] * 20 + ["stop"] * 20
    assert numbers(table.page(Query(descending=True), 0, 3).rows) == [59, 58, 57]


@pytest.mark.parametrize("column", ["reward", "tokens", "advantage", "rewards.format", "group"])
def test_bins_hold_what_a_filter_of_their_edges_leaves(table: TrajectoryTable, column: str) -> None:
    found = table.histogram("stop != 'error'", column, 7)
    assert sum(found.counts) + found.unknown == 40
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        text = f"stop != 'error' and {low!r} <= {column} < {high!r}"
        assert table.page(Query(text), 0, 0).matching == count
    assert all(float(edge) == round(edge, 6) for edge in found.edges)


def test_histograms_of_odd_values() -> None:
    records = np.zeros(5, [("x", "<f4"), ("same", "<f4"), ("none", "<f4")])
    records["x"] = [np.inf, -np.inf, np.nan, 1e-8, 3e8]
    records["same"], records["none"] = 0.3, np.nan
    table = TrajectoryTable(records, {})
    x = table.histogram("", "x")
    assert (x.unknown, x.infinite, sum(x.counts)) == (1, 2, 2)
    same = table.histogram("", "same")
    assert sum(same.counts) == 5
    assert table.page(Query(f"{same.edges[0]} <= same < {same.edges[-1]}"), 0, 0).matching == 5
    assert (table.histogram("", "none").counts, table.histogram("", "none").unknown) == ([], 5)


def test_counts_are_of_columns_with_several_values(table: TrajectoryTable) -> None:
    counts = table.counts("tokens == 0")
    assert counts["stop"] == {"stop": 4, "length": 4, "error": 4}
    assert counts["failed"] == {"false": 8, "true": 4}
    assert "environment" not in counts


def test_a_wrong_filter_and_a_wrong_column_are_named(table: TrajectoryTable) -> None:
    with pytest.raises(UiError) as caught:
        table.page(Query("reward > 0 and  stp == 'x'"), 0, 10)
    assert caught.value.body() == {
        "error": "no column stp",
        "place": "columns 17 to 19",
        "fix": "did you mean `stop`?",
    }
    with pytest.raises(UiError, match="no column rewad"):
        table.page(Query(sort="rewad"), 0, 10)
    with pytest.raises(UiError, match="stop has no numbers"):
        table.histogram("", "stop")


def test_a_table_stays_while_the_run_adds_rows(run: Path) -> None:
    tables = Tables()
    before = tables.open(run)
    IndexWriter(run / "trajectories").append([written(60)])
    assert len(tables.open(run)) == 61
    assert len(tables.open(run, 60)) == len(before) == 60
    assert tables.open(run) is tables.open(run)
    assert tables.count(run) == 61


def test_groups_and_tasks(tmp_path: Path) -> None:
    table = Tables().open(make_run(tmp_path / "run"))
    number = table.find(2, 2, 1, Series())
    assert [(row["group"], row["sample"]) for row in table.siblings(number)] == [(2, 0), (2, 1)]
    steps = [row["step"] for row in table.of_task(7, Series(), 0, 100).rows]
    assert steps == [1, 1, 2, 2, 3, 3]
    assert table.trend(7, Series()) == {"steps": [1, 2, 3], "rewards": [1.5, 1.5, 1.5]}
    first_ones = table.of_task(7, Series(), 0, 100, each=False).rows
    assert [(row["step"], row["sample"]) for row in first_ones] == [(1, 0), (2, 0), (3, 0)]
    page = table.of_task(2, Series("validation", "easy"), 0, 100, stored=True)
    assert page.matching == 0  # tasks 0 and 1 are
    assert table.of_task(2, Series("validation", "easy"), 0, 100).matching == 1
    with pytest.raises(UiError, match="no trajectory 2/2/9"):
        table.find(2, 2, 9, Series())


def test_a_run_without_an_index_is_shown_by_its_samples(tmp_path: Path) -> None:
    samples = [make_sample(1), make_sample(2, reward=-1.0, stop="length", error="x", rewards={"a": 2.0})]
    old = '{"step": 3, "reward": 0.5, "prompt": "p", "completion": "é"}'  # without later fields
    write_samples(tmp_path, samples, "{torn", '{"step": 1e30, "reward": 0}', old)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 4')  # being written
    table = Tables().open(tmp_path)
    assert table.source == "samples"
    assert "has no index of trajectories" in table.notes[0]
    assert "line 3 is left out" in table.notes[1]
    assert "line 4 is left out: ValueError('a number is too large')" in table.notes[2]
    page = table.page(Query("reward < 1", "step"), 0, 10)
    assert [(row["step"], row["stop"], row["failed"]) for row in page.rows] == [
        (2, "length", True),
        (3, "", False),
    ]
    assert table.sample(page.rows[1]["row"])["completion"] == "é"
    assert table.page(Query("rewards.a == 2"), 0, 10).matching == 1


def test_indexes_that_cannot_be_read_are_named(run: Path, tmp_path: Path) -> None:
    folder = run / "trajectories"
    columns = json.loads((folder / COLUMNS).read_text())
    with pytest.raises(UiError, match="has no index of trajectories") as caught:
        Tables().open(tmp_path)
    assert "logger.trajectories" in caught.value.fix
    (folder / COLUMNS).write_text(json.dumps(columns | {"format": 99}))
    with pytest.raises(UiError, match="format 99 is not 1"):
        Tables().open(run)
    write_samples(run, [make_sample(1)])
    assert "format 99 is not 1" in Tables().open(run).notes[0]
    (folder / COLUMNS).write_text(json.dumps(columns | {"types": {"step": "a type"}}))
    assert "columns.json cannot be read" in Tables().open(run).notes[0]
    (folder / COLUMNS).write_text(json.dumps(columns | {"types": {"step": "<i4"}, "texts": {}}))
    assert "columns.json lacks the columns phase" in Tables().open(run).notes[0]
    (folder / COLUMNS).write_text(json.dumps(columns | {"texts": columns["texts"] | {"stop": ["stop"]}}))
    assert "index.bin is corrupt from row 2 on" in Tables().open(run).notes[0]
    assert len(Tables().open(run)) == 1
    (folder / COLUMNS).write_text(json.dumps(columns))
    (folder / columns["file"]).unlink()
    assert "index.bin is missing" in Tables().open(run).notes[0]


def test_of_an_index_of_random_bytes_the_samples_are_shown(run: Path) -> None:
    file = run / "trajectories" / "index.bin"
    file.write_bytes(np.random.default_rng(1).bytes(file.stat().st_size))
    tables = Tables()
    with pytest.raises(UiError, match=r"index\.bin is corrupt") as caught:
        tables.open(run)
    assert caught.value.status == 404
    (run / "trajectories" / "step_000001-0.json").touch()
    with pytest.raises(UiError) as caught:
        tables.open(run)
    assert f"`nemorl show {run}`" in caught.value.fix
    write_samples(run, [make_sample(1), make_sample(2)])
    table = tables.open(run)
    assert (table.source, len(table), tables.count(run)) == ("samples", 2, 2)
    assert f"{file} is corrupt" in table.notes[0]


def test_of_an_index_with_a_corrupt_end_the_rows_before_it_are_shown(run: Path) -> None:
    file = run / "trajectories" / "index.bin"
    size = file.stat().st_size
    with file.open("r+b") as corrupt:
        corrupt.seek(size * 40 // 60)
        corrupt.write(b"\xff" * (size // 3))
    tables = Tables()
    table = tables.open(run)
    assert (table.source, len(table), tables.count(run), len(tables.open(run, 40))) == ("index", 40, 40, 40)
    assert "index.bin is corrupt from row 41 on" in table.notes[0]


def test_texts_that_a_run_adds_while_its_rows_are_read_are_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are mapped after the columns were read, and in between the run wrote both."""
    read, folder = TrajectoryIndex.read, run / "trajectories"
    before, _ = TrajectoryIndex(folder).read()
    IndexWriter(folder).append([replace(written(60), stop="new")])
    answers = iter([(before, read(TrajectoryIndex(folder))[1])])
    monkeypatch.setattr(TrajectoryIndex, "read", lambda self: next(answers, None) or read(self))
    table = Tables().open(run)
    assert (len(table), table.notes, table.rows([60])[0]["stop"]) == (61, [], "new")


def test_a_partial_row_is_left_out(run: Path) -> None:
    columns, _ = TrajectoryIndex(run / "trajectories").read()
    with (run / "trajectories" / columns.file).open("ab") as file:
        file.write(b"x" * 20)
    assert len(Tables().open(run)) == 60
