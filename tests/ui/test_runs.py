"""How a run is going, read from its folder and the system's processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemorl.observe.live import LiveEnd
from nemorl.observe.run_folder import read_header
from nemorl.ui.folders import Folders
from nemorl.ui.runs import RunList, RunStatus, last_line, run_status, seconds_of
from tests.ui.folders import append_steps, make_run, moment, step_metrics, write_live
from tests.ui.requests import get

SLEEPER = "import time; time.sleep(600)"


def status(folder: Path, **options: float) -> RunStatus:
    return run_status(folder, read_header(folder / "header.json"), **options)


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """A process whose arguments after the interpreter's are those of a run's command."""
    running = subprocess.Popen([sys.executable, "-c", SLEEPER, "train", "experiment.yaml"])
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def test_a_run_that_ended_says_how(tmp_path):
    for outcome in ("complete", "stopped", "failed"):
        end = {"time": "2026-01-01T00:00:00+00:00", "outcome": outcome, "error": "of memory"}
        found = status(make_run(tmp_path / outcome, end=end))
        assert (found.state, found.words) == (outcome, "of memory")


def test_a_driver_without_an_end_is_killed_when_its_process_is_gone(tmp_path, process):
    folder = make_run(tmp_path / "run", pid=process.pid, live={})
    assert status(folder).state == "running"
    process.kill()
    process.wait()
    assert status(folder).state == "killed"


def test_a_suspended_driver_is_named(tmp_path, process):
    folder = make_run(tmp_path / "run", pid=process.pid, live={})
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert status(folder).state == "suspended"


def test_another_process_with_the_number_is_not_the_run(tmp_path, process):
    """Proof takes the start and the arguments, as numbers of processes are used again."""
    other_command = make_run(tmp_path / "command", pid=process.pid, command="nemorl train b.yaml", live={})
    assert status(other_command).state == "killed"
    assert status(other_command).driver.pid is None
    began_later = make_run(tmp_path / "start", pid=process.pid, started=time.time() - 100, live={})
    assert status(began_later).driver.pid is None
    mine = make_run(tmp_path / "mine", pid=os.getpid(), live={})
    assert status(mine).driver.pid is None


def test_a_start_without_its_first_live_file_is_starting(tmp_path, process):
    folder = make_run(tmp_path / "run", pid=process.pid)
    assert status(folder).state == "starting"
    old = {"end": LiveEnd("stopped"), "written": time.time() - 1000}
    write_live(folder, **old)  # of the start before
    assert status(folder).state == "starting"


def test_a_run_of_another_host_is_silent_when_it_writes_no_more(tmp_path):
    folder = make_run(tmp_path / "run", pid=1, host="elsewhere", live={})
    assert status(folder).state == "running"
    found = status(folder, now=time.time() + 60)
    assert (found.state, found.driver.host, found.driver.pid) == ("silent", "elsewhere", None)


def test_summaries_follow_the_files(tmp_path):
    folder, runs = make_run(tmp_path / "run", steps=3), RunList()
    first = runs.summary("run", folder)
    assert (first.step, first.total_steps, first.reward, first.algorithm) == (3, 10, 0.03, "grpo")
    append_steps(folder, [step_metrics(4, **{"reward/mean": float("nan")})])
    second = runs.summary("run", folder)
    assert second.step == 4
    assert second.reward != second.reward


def test_the_time_of_a_run_is_that_of_its_drivers():
    ended = {"started": moment(1000), "end": {"time": moment(1060), "outcome": "stopped"}}
    killed = {"started": moment(2000)}
    assert seconds_of([ended], 5000.0) == 60
    assert seconds_of([ended, killed], 2100.0) == 60 + 100  # until it has last written
    resumed = {**killed, "last_written": moment(2030)}
    assert seconds_of([resumed, ended], 5000.0) == 30 + 60
    assert seconds_of([killed, ended], 5000.0) == 60  # of another release: how long the first ran is unknown
    assert seconds_of([{"started": None}], 5000.0) is None
    assert seconds_of([], 5000.0) is None


def test_the_list_has_the_time_of_each_run(tmp_path):
    began = time.time() - 100
    end = {"outcome": "complete", "error": "", "time": moment(began + 30)}
    make_run(tmp_path / "complete", started=began, end=end)
    make_run(tmp_path / "killed", started=began, pid=1, live={})
    (complete, killed) = get(tmp_path, "/api/runs/list")[1]
    assert complete["seconds"] == 30
    assert 99 < killed["seconds"] < 130


def test_the_last_complete_line_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_line(path) == {}
    path.write_text('{"step": 1}\n{"step": 2}\n[3]\nnot json\n{"step": 4', encoding="utf-8")
    assert last_line(path) == {"step": 2}


def test_a_corrupt_header_is_a_remark_in_the_list(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "header.json").write_text("{", encoding="utf-8")
    code, (run,) = get(tmp_path, "/api/runs/list")
    assert code == 200
    assert "is not JSON" in run["problem"]
    code, state = get(tmp_path, "/api/watch/state", run="run")
    assert code == 200
    assert any("is not JSON" in words for words in state["problems"])


def test_runs_are_found_below_folders_and_not_inside_of_runs(tmp_path):
    make_run(tmp_path / "a" / "b" / "one")
    make_run(tmp_path / "a" / "b" / "one" / "nested")
    make_run(tmp_path / ".hidden" / "run")
    make_run(tmp_path / "two")
    assert [name for name, _ in Folders(tmp_path).runs()] == ["a/b/one", "two"]
