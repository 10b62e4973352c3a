"""A folder holds one run, explains itself, and a resume keeps what still holds."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime

import pytest

from nemorl.observe.files import JsonLinesWriter, RunFolderError, WriteError
from nemorl.observe.metrics import StepMetrics, read_metrics, read_samples
from nemorl.observe.run_folder import RunFolder, git_commit, read_header
from tests.full_disk import files_end_at
from tests.observe.examples import CONFIG, make_sample


def record(folder: RunFolder, steps: range) -> None:
    metrics, samples = JsonLinesWriter(folder.paths.metrics), JsonLinesWriter(folder.paths.samples)
    for step in steps:
        for _ in range(2):
            samples.append(asdict(make_sample(step)))
        metrics.append(StepMetrics(step, step, {"reward/mean": step / 10}).to_json())
    metrics.close()
    samples.close()


def test_a_new_run_says_what_it_is(run_dir):
    folder = RunFolder.create(run_dir, CONFIG)
    folder.add_facts({"kernels": "torch SDPA"})
    folder.add_facts({"layout": "TP2"})
    assert folder.paths.config.read_text() == CONFIG
    (start,) = read_header(folder.paths.header)
    assert start["run"] == {"kernels": "torch SDPA", "layout": "TP2"}
    assert start["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert start["machine"]["cores"] >= 1
    about = (run_dir / "ABOUT.md").read_text()
    assert all(f"`{p.name}" in about for p in run_dir.iterdir() if p.name not in ("ABOUT.md", ".lock"))


def test_a_second_run_does_not_overwrite_the_first(run_dir):
    RunFolder.create(run_dir, "seed: 3\n").close()
    folder = RunFolder.create(run_dir, CONFIG)  # nothing is lost of a start that came to no step
    record(folder, range(1))
    folder.close()
    with pytest.raises(RunFolderError, match=r"already holds a run\. Continue it with --resume"):
        RunFolder.create(run_dir, "seed: 2\n")
    assert (run_dir / "config.yaml").read_text() == CONFIG
    RunFolder.resume(run_dir, CONFIG, step=None).close()  # the refusal left the folder free


def test_resume_cuts_off_what_will_come_again(run_dir):
    folder = RunFolder.create(run_dir, CONFIG)
    record(folder, range(6))
    folder.paths.metrics.write_bytes(folder.paths.metrics.read_bytes() + b'{"step": 6, "ver')
    folder.close()

    resumed = RunFolder.resume(run_dir, CONFIG, step=3)
    record(resumed, range(4, 5))
    assert [step.step for step in read_metrics(resumed.paths.metrics)] == [0, 1, 2, 3, 4]
    assert [sample.step for sample in read_samples(resumed.paths.samples)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [start["resumed_step"] for start in read_header(resumed.paths.header)] == [None, 3]


def test_the_next_start_notes_until_when_a_killed_one_wrote(run_dir):
    killed = RunFolder.create(run_dir, CONFIG)
    record(killed, range(3))
    os.utime(killed.paths.metrics, (2000, 2000))
    killed.close()  # without an end

    ended = RunFolder.resume(run_dir, CONFIG, step=1)  # cuts the metrics
    ended.record_end(None)
    ended.close()
    RunFolder.resume(run_dir, CONFIG, step=1).close()

    first, second, third = read_header(ended.paths.header)
    assert datetime.fromisoformat(first["last_written"]).timestamp() == 2000
    assert second["end"]["outcome"] == "complete"
    assert "last_written" not in {**second, **third}


def test_resume_without_a_checkpoint_starts_over(run_dir):
    folder = RunFolder.create(run_dir, CONFIG)
    record(folder, range(2))
    folder.close()
    resumed = RunFolder.resume(run_dir, CONFIG, step=None)
    assert read_metrics(resumed.paths.metrics) == []


def test_two_processes_cannot_write_one_run(run_dir):
    code = (
        "import sys; from pathlib import Path; from nemorl.observe.run_folder import RunFolder\n"
        "folder = RunFolder.create(Path(sys.argv[1]), ''); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RunFolderError, match=f"is being written by process {other.pid} on "):
            RunFolder.resume(run_dir, "", step=None)
        other.kill()
    RunFolder.resume(run_dir, "", step=None).close()  # a killed process holds nothing


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(WriteError, match="run could not be written: File exists"):
        RunFolder.create(tmp_path / "run", CONFIG)


def test_a_corrupt_header_is_named(run_dir):
    RunFolder.create(run_dir, CONFIG).close()
    (run_dir / "header.json").write_text("[{")
    with pytest.raises(RunFolderError, match=r"header\.json is not JSON"):
        RunFolder.resume(run_dir, CONFIG, step=None)


def test_the_commit_is_that_of_a_tracked_file_only(tmp_path):
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    file, stranger = tmp_path / "a.py", tmp_path / "b.py"
    file.write_text("1")
    stranger.write_text("2")
    assert git_commit(file) is None
    git("init", "-q")
    git("add", "a.py")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert git_commit(file) == commit
    assert git_commit(stranger) is None
    file.write_text("3")
    assert git_commit(file) == f"{commit}+changes"


def test_a_run_folder_without_room_is_named(run_dir):
    with files_end_at(0), pytest.raises(WriteError, match=r"run/\.lock could not be written: File too large"):
        RunFolder.create(run_dir, CONFIG)
    RunFolder.create(run_dir, CONFIG).close()
    (run_dir / "logs").rmdir()
    (run_dir / "logs").write_text("in the way")
    with pytest.raises(WriteError, match=r"run/logs could not be written: File exists"):
        RunFolder.resume(run_dir, CONFIG, step=None)


def test_the_header_is_strict_json(run_dir):
    RunFolder.create(run_dir, CONFIG).close()
    assert isinstance(json.loads((run_dir / "header.json").read_text()), list)
