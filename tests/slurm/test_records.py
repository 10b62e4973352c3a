from pathlib import Path

import pytest

from nemorl.slurm.records import Ending, barren_restarts, newest_step, with_bound


def ended(run_dir: Path, restart: int, code: int, before: int, after: int) -> None:
    """How a start of job 12 ended."""
    folder = run_dir / "slurm" / f"12.{restart}"
    folder.mkdir(parents=True)
    Ending(code, "because", before, after).write(folder)


def test_the_newest_step_is_that_of_a_whole_checkpoint(tmp_path: Path) -> None:
    assert newest_step(tmp_path) == 0
    for name in ("step_00000008", "step_00000010", ".step_00000012.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)

    assert newest_step(tmp_path) == 10


def test_starts_in_a_row_without_a_new_checkpoint_are_counted(tmp_path: Path) -> None:
    ended(tmp_path, 0, 75, 0, 0)
    ended(tmp_path, 1, 75, 0, 20)
    ended(tmp_path, 2, 75, 20, 20)
    ended(tmp_path, 3, 75, 20, 20)

    assert barren_restarts(tmp_path, "12", 4) == 2
    assert barren_restarts(tmp_path, "12", 2) == 0
    assert barren_restarts(tmp_path, "13", 4) == 0


def test_a_pre_empted_start_is_none_of_them(tmp_path: Path) -> None:
    ended(tmp_path, 0, 75, 0, 0)
    ended(tmp_path, 1, 143, 0, 0)

    assert barren_restarts(tmp_path, "12", 2) == 0


@pytest.mark.parametrize(
    ("ending", "barren", "code"),
    [
        (Ending(75, "", 0, 0), 0, 75),
        (Ending(75, "", 0, 0), 2, 75),
        (Ending(75, "", 0, 0), 3, 1),
        (Ending(75, "", 0, 5), 3, 75),
        (Ending(143, "", 0, 0), 3, 143),
        (Ending(0, "", 0, 0), 3, 0),
    ],
)
def test_another_start_is_asked_for_as_long_as_it_may_help(ending: Ending, barren: int, code: int) -> None:
    assert with_bound(ending, barren, limit=3).code == code


def test_the_end_of_the_restarts_says_why() -> None:
    bound = with_bound(Ending(75, "node n2 is lost", 10, 10), 3, limit=3)

    assert bound.reason.startswith("node n2 is lost; 4 starts in a row brought no new checkpoint")
    assert "NEMORL_MAX_RESTARTS = 3" in bound.reason
