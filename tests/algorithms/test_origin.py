"""Weights know where they come from, and a wrong name of a checkpoint is answered with the right one."""

from pathlib import Path

import pytest

from nemorl.algorithms.origin import ORIGIN_FILE, Origin
from nemorl.algorithms.run import export_checkpoint
from nemorl.errors import RunError


def test_an_origin_is_read_as_it_was_written(tmp_path: Path) -> None:
    Origin("runs/sums", 40).write(tmp_path)

    assert Origin.read(tmp_path) == Origin("runs/sums", 40)
    assert str(Origin.read(tmp_path)) == "step 40 of runs/sums"


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"run": "a", "step": null}'])
def test_a_folder_of_somebody_else_has_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / ORIGIN_FILE).write_text(text)

    assert Origin.read(tmp_path) is None


@pytest.mark.parametrize("named", ["runs/sums", "runs/sums/checkpoints"])
def test_the_newest_checkpoint_is_named_to_who_names_the_run(tmp_path: Path, named: str) -> None:
    for step in (8, 10, 9):
        (tmp_path / f"runs/sums/checkpoints/step_{step:08d}").mkdir(parents=True)

    newest = tmp_path / "runs/sums/checkpoints/step_00000010"
    with pytest.raises(
        RunError, match=rf"{named} holds checkpoints: name one of them; the newest is {newest}$"
    ):
        export_checkpoint(tmp_path / named, tmp_path / "out")


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()

    with pytest.raises(RunError, match="is a run without a checkpoint yet"):
        export_checkpoint(tmp_path, tmp_path / "out")
