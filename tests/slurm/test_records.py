from pathlib import Path

import pytest

from nemorl.slurm.start import ExitRecord, ExitRecorder, newest_step, restarts_without_progress


def ended(run_dir: Path, restart: int, code: int, before: int, after: int, attempt: str = "") -> None:
    """Record how a start of job 12 ended."""
    folder = run_dir / "slurm" / f"12.{restart}{attempt}"
    folder.mkdir(parents=True)
    ExitRecord(code, "because", before, after).write(folder)


def test_the_newest_step_is_that_of_a_complete_checkpoint(tmp_path: Path) -> None:
    assert newest_step(tmp_path) == 0
    for name in ("step_00000008", "step_00000010", ".step_00000012.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)

    assert newest_step(tmp_path) == 10


def test_consecutive_starts_without_a_new_checkpoint_are_counted(tmp_path: Path) -> None:
    ended(tmp_path, 0, 75, 0, 0)
    ended(tmp_path, 1, 75, 0, 20)
    ended(tmp_path, 2, 75, 20, 20)
    ended(tmp_path, 3, 75, 20, 20)

    assert restarts_without_progress(tmp_path, "12", 4) == 2
    assert restarts_without_progress(tmp_path, "12", 2) == 0
    assert restarts_without_progress(tmp_path, "13", 4) == 0


def test_of_several_attempts_at_a_start_the_last_counts(tmp_path: Path) -> None:
    ended(tmp_path, 0, 75, 0, 0)
    ended(tmp_path, 0, 1, 0, 0, ".2")
    ended(tmp_path, 0, 75, 0, 0, ".10")
    (tmp_path / "slurm" / "12.0.11").mkdir()

    assert restarts_without_progress(tmp_path, "12", 1) == 1


def test_a_record_obeys_the_bound_and_reaches_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMORL_STATUS_FILE", str(tmp_path / "status"))
    ended(tmp_path, 0, 75, 0, 0)
    recorder = ExitRecorder(tmp_path, tmp_path / "slurm" / "12.0", "12", 1)
    for limit, code in ((2, 75), (1, 1)):
        recorder.max_restarts = limit

        assert recorder.write(75, "killed").code == code
        assert (tmp_path / "status").read_text() == f"{code}\n"
        kept = ExitRecord.read(tmp_path / "slurm" / "12.0")
        assert kept is not None
        assert (kept.code, kept.reason[:6]) == (code, "killed")


def test_a_full_disk_does_not_hide_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMORL_STATUS_FILE", str(tmp_path / "status"))

    assert ExitRecorder(tmp_path, tmp_path / "no such folder", "12", 0).write(75, "killed").code == 75

    assert (tmp_path / "status").read_text() == "75\n"


def test_a_pre_empted_start_is_not_counted(tmp_path: Path) -> None:
    ended(tmp_path, 0, 75, 0, 0)
    ended(tmp_path, 1, 143, 0, 0)

    assert restarts_without_progress(tmp_path, "12", 2) == 0


@pytest.mark.parametrize(
    ("code", "step", "restarts", "expected"),
    [(75, 0, 0, 75), (75, 0, 2, 75), (75, 0, 3, 1), (75, 5, 3, 75), (143, 0, 3, 143), (0, 0, 3, 0)],
)
def test_a_job_is_requeued_while_it_makes_progress_or_restarts_are_left(
    tmp_path: Path, code: int, step: int, restarts: int, expected: int
) -> None:
    for restart in range(restarts):
        ended(tmp_path, restart, 75, 0, 0)
    folder = tmp_path / "slurm" / f"12.{restarts}"
    folder.mkdir(parents=True)
    recorder = ExitRecorder(tmp_path, folder, "12", restarts)
    if step:
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)

    record = recorder.write(code, "node n2 is lost")

    assert record.code == expected
    if expected == 1:
        assert record.reason == (
            "node n2 is lost; 4 consecutive starts wrote no new checkpoint (NEMORL_MAX_RESTARTS = 3); "
            "not requeued"
        )
