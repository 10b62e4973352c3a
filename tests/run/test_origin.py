"""Weights know where they come from, and a wrong name of a checkpoint is answered with the right one."""

from pathlib import Path

import pytest

from nemorl.errors import UsageError
from nemorl.megatron.checkpoint_store import CheckpointStore
from nemorl.run.checkpoints import ORIGIN_FILE, Origin, export_checkpoint
from tests.config.experiments import GRPO, write


def test_an_origin_is_read_as_it_was_written(tmp_path: Path) -> None:
    Origin("runs/sums", 40).write(tmp_path)

    assert Origin.read(tmp_path) == Origin("runs/sums", 40)
    assert str(Origin.read(tmp_path)) == "step 40 of runs/sums"


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"run": "a", "step": null}'])
def test_a_folder_of_another_program_has_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / ORIGIN_FILE).write_text(text)

    assert Origin.read(tmp_path) is None


@pytest.mark.parametrize("named", ["runs/sums", "runs/sums/checkpoints"])
def test_the_newest_checkpoint_is_named_to_who_names_the_run(tmp_path: Path, named: str) -> None:
    for step in (8, 10, 9):
        (tmp_path / f"runs/sums/checkpoints/step_{step:08d}").mkdir(parents=True)

    newest = tmp_path / "runs/sums/checkpoints/step_00000010"
    with pytest.raises(
        UsageError, match=rf"{named} holds checkpoints: name one of them; the newest is {newest}$"
    ):
        export_checkpoint(tmp_path / named, tmp_path / "out")


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()

    with pytest.raises(UsageError, match="is a run without a checkpoint yet"):
        export_checkpoint(tmp_path, tmp_path / "out")


def test_a_checkpoint_that_is_not_there_is_answered_with_one_that_is(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"there is no checkpoint .*step_00000005: name one such as RUN_DIR/"
    ):
        export_checkpoint(tmp_path / "checkpoints/step_00000005", tmp_path / "out")
    newest = tmp_path / "checkpoints/step_00000004"
    newest.mkdir(parents=True)
    with pytest.raises(UsageError, match=rf"there is no checkpoint .*5: the newest is {newest}$"):
        export_checkpoint(tmp_path / "checkpoints/step_00000005", tmp_path / "out")


def test_a_model_is_no_checkpoint_of_a_run(tmp_path: Path) -> None:
    model = tmp_path / "models/tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")

    with pytest.raises(UsageError, match="models/tiny is not in the `checkpoints` of a run folder"):
        export_checkpoint(model, tmp_path / "out")


def test_a_config_of_an_older_version_is_refused_with_the_field_and_what_to_do(tmp_path: Path) -> None:
    """A field of it is no more."""
    store = CheckpointStore(tmp_path / "checkpoints")
    (store.begin(3) / "weights").write_text("as they were")
    checkpoint = store.commit(3, {})
    config = write(tmp_path, GRPO.replace("policy:", "policy:\n  gradient_scale: 2", 1), "config.yaml")

    with pytest.raises(UsageError) as refusal:
        export_checkpoint(checkpoint, tmp_path / "out")

    assert f"{config}: 1 configuration error" in str(refusal.value)
    assert "policy.gradient_scale = 2" in str(refusal.value)
    assert "remove those that are no more) and export again" in str(refusal.value)
    assert not (tmp_path / "out").exists()
