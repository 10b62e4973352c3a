from pathlib import Path

import pytest

from nemorl.slurm.records import Ending, Record, barren_restarts, newest_step, with_bound


def ended(run_dir: Path, restart: int, code: int, before: int, after: int, attempt: str = "") -> None:
    """How a start of job 12 ended."""
    folder = run_dir / "slurm" / f"12.{restart}{attempt}"
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


def test_of_several_attempts_at_a_start_the_last_counts(tmp_path: Path) -> None:
    ended(tmp_path, 0, 75, 0, 0)
    ended(tmp_path, 0, 1, 0, 0, ".2")
    ended(tmp_path, 0, 75, 0, 0, ".10")
    (tmp_path / "slurm" / "12.0.11").mkdir()

    assert barren_restarts(tmp_path, "12", 1) == 1


def test_what_is_kept_on_the_way_obeys_the_bound_and_says_it_to_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMORL_VERDICT", str(tmp_path / "verdict"))
    ended(tmp_path, 0, 75, 0, 0)
    record = Record(tmp_path, tmp_path / "slurm" / "12.0", "12", 1)
    for limit, code in ((2, 75), (1, 1)):
        record.limit = limit

        assert record.keep(75, "killed").code == code
        assert (tmp_path / "verdict").read_text() == f"{code}\n"
        kept = Ending.read(tmp_path / "slurm" / "12.0")
        assert kept is not None
        assert (kept.code, kept.reason[:6]) == (code, "killed")


def test_a_full_disk_does_not_hide_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMORL_VERDICT", str(tmp_path / "verdict"))

    assert Record(tmp_path, tmp_path / "no such folder", "12", 0).keep(75, "killed").code == 75

    assert (tmp_path / "verdict").read_text() == "75\n"


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
