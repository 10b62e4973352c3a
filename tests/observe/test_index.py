"""Rows of trajectories are read as they were written, and survive resumes, partial ends and new rewards."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemorl.observe.files import RunFolderError, WriteError
from nemorl.observe.index import COLUMNS, IndexWriter, TrajectoryIndex, TrajectoryRow

ROW = TrajectoryRow(
    step=1,
    phase="training",
    group=768,
    sample=3,
    task=8132,
    turns=2,
    tokens=40,
    sampled=12,
    reward=0.25,
    rewards={"format": 1.0},
    stop="length",
    min_version=4,
    max_version=5,
    seconds_generation=1.5,
    seconds_environment=0.25,
    advantage=-0.5,
    trains=True,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "trajectories"


def rows(folder: Path) -> list[dict[str, object]]:
    """With texts in place of their numbers."""
    columns, records = TrajectoryIndex(folder).read()
    found = []
    for record in records:
        row = {name: record[name].item() for name in columns.types}
        found.append(row | {name: texts[row[name]] for name, texts in columns.texts.items()})
    return found


def test_rows_are_read_as_they_were_written(folder):
    writer = IndexWriter(folder)
    writer.append([ROW, replace(ROW, sample=4, phase="validation", validation_set="easy", player="white")])
    writer.append([replace(ROW, step=2, stop="stop")])
    first, second, third = rows(folder)
    assert (first["group"], first["task"], first["reward"], first["reward.format"]) == (768, 8132, 0.25, 1)
    assert (first["advantage"], first["stop"], first["trains"], first["failed"]) == (
        -0.5,
        "length",
        True,
        False,
    )
    assert np.isnan(first["logprob_gap"])
    assert (second["phase"], second["validation_set"], second["player"]) == ("validation", "easy", "white")
    assert (third["step"], third["stop"], third["validation_set"]) == (2, "stop", "")


def test_rewards_of_new_names_become_columns(folder):
    writer = IndexWriter(folder)
    writer.append([ROW])
    _, before = TrajectoryIndex(folder).read()
    writer.append([replace(ROW, step=2, rewards={"math": 1.0})])
    first, second = rows(folder)
    assert first["reward.format"] == 1
    assert np.isnan(first["reward.math"])
    assert second["reward.math"] == 1
    assert np.isnan(second["reward.format"])
    assert before["reward"][0] == 0.25  # a reader's view of the former file stays whole
    assert len(list(folder.glob("index*.bin"))) == 1


def test_a_resumed_run_has_each_step_once(folder):
    writer = IndexWriter(folder)
    # The validation of a step may end while the next one trains.
    writer.append([replace(ROW, step=step) for step in (1, 2)])
    writer.append([replace(ROW, step=3), replace(ROW, step=2, phase="validation")])
    writer.keep_until(2)
    assert [row["step"] for row in rows(folder)] == [1, 2, 2]
    IndexWriter(folder).append([replace(ROW, step=3)])
    assert [row["step"] for row in rows(folder)] == [1, 2, 2, 3]


def test_a_partial_end_is_left_out_and_written_over(folder):
    IndexWriter(folder).append([ROW, ROW])
    file = folder / TrajectoryIndex(folder).read()[0].file
    size = file.stat().st_size
    with file.open("ab") as cut:
        cut.write(b"x" * 7)
    assert len(rows(folder)) == 2
    IndexWriter(folder).append([replace(ROW, step=5)])
    assert [row["step"] for row in rows(folder)] == [1, 1, 5]
    assert file.stat().st_size == size * 3 // 2


def test_what_cannot_be_read_or_written_is_named(folder, tmp_path):
    with pytest.raises(RunFolderError, match="has no index of trajectories"):
        TrajectoryIndex(folder).read()
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="file/trajectories could not be written"):
        IndexWriter(tmp_path / "file" / "trajectories")
    IndexWriter(folder).append([ROW])
    (folder / COLUMNS).write_text("{")
    with pytest.raises(RunFolderError, match=r"columns\.json cannot be read"):
        TrajectoryIndex(folder).read()


@pytest.mark.parametrize(
    "changes",
    [
        *({"types": {"step": given}} for given in ("a type", "O", "V0", "(2,)<i4", "i4,,(", 3, None)),
        *({"types": given} for given in ("<i4", ["step"], None)),
        {"texts": {"step": ["a"]}},
        {"texts": {"stop": "stop"}},
        *({"file": name} for name in ("../index.bin", "/dev/zero", "columns.json", 3)),
    ],
)
def test_columns_that_no_writer_has_written_are_refused(folder, changes):
    """What numpy makes of other types may be no rows at all; other files are none of the index."""
    IndexWriter(folder).append([ROW])
    written = json.loads((folder / COLUMNS).read_text())
    (folder / COLUMNS).write_text(json.dumps(written | changes))
    with pytest.raises(RunFolderError, match=r"columns\.json cannot be read"):
        TrajectoryIndex(folder).read()
    IndexWriter(folder).append([ROW])  # a run that is resumed begins another index
    assert len(rows(folder)) == 1


def test_a_run_that_is_killed_between_new_texts_and_their_rows_is_read_right(folder):
    writer = IndexWriter(folder)
    writer.append([ROW])
    writer._widen([replace(ROW, step=2, stop="error", environment="b")])  # and no more
    assert TrajectoryIndex(folder).read()[0].texts["stop"] == ["length", "error"]
    assert [(row["step"], row["stop"], row["environment"]) for row in rows(folder)] == [(1, "length", "")]
    IndexWriter(folder).append([replace(ROW, step=2, stop="stop", environment="b"), replace(ROW, step=3)])
    found = [(row["step"], row["stop"], row["environment"]) for row in rows(folder)]
    assert found == [(1, "length", ""), (2, "stop", "b"), (3, "length", "")]
