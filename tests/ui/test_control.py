"""Starting, stopping and resuming runs by requests, with real runs."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemorl.config.yaml import parse_value
from nemorl.observe.metrics import read_metrics
from nemorl.observe.run_folder import RunPaths, read_header
from nemorl.slurm.submission import Submission
from nemorl.ui.control import OUTPUT
from nemorl.ui.runs import run_status
from tests.run.runs import tiny_model, write_experiment
from tests.ui.folders import make_run
from tests.ui.requests import KEY, Client, asked, get


def post(root: Path, path: str, **body: Any) -> tuple[int, Any]:
    async def work(client: Client) -> tuple[int, Any]:
        answer = await client.post(path, headers=KEY, json=body)
        return answer.status, await answer.json()

    return asked(root, work)


def test_only_a_process_that_is_the_run_is_stopped(tmp_path):
    """The folder names a process with another command."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        make_run(tmp_path / "run", pid=other.pid, live={})
        status, body = post(tmp_path, "/api/control/stop", run="run")
        assert status == 409
        assert "no process to stop" in body["error"]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_run_of_another_host_is_not_stopped_and_says_where_it_is(tmp_path):
    make_run(tmp_path / "run", pid=os.getpid(), host="elsewhere", live={})
    status, body = post(tmp_path, "/api/control/stop", run="run")
    assert (status, body["error"]) == (409, "the run's driver is a process on elsewhere")


def test_the_first_signal_reaches_a_suspended_driver(tmp_path):
    words = ["train", "experiment.yaml"]
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *words])
    try:
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        make_run(tmp_path / "run", pid=process.pid, live={})
        assert post(tmp_path, "/api/control/stop", run="run") == (200, {"pid": process.pid})
        assert process.wait(60) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff"])
def test_bodies_that_are_no_objects_are_refused(tmp_path, body):
    async def work(client: Client) -> int:
        return (await client.post("/api/control/stop", headers=KEY, data=body)).status

    assert asked(tmp_path, work) == 400


def test_a_start_needs_a_file_and_an_id(tmp_path):
    assert post(tmp_path, "/api/control/start", file="none.yaml", id="1")[0] == 404
    (tmp_path / "a.yaml").write_text("a: 1\n", encoding="utf-8")
    status, body = post(tmp_path, "/api/control/start", file="a.yaml")
    assert (status, body["place"]) == (400, "id")


def test_a_config_that_check_refuses_starts_nothing(tmp_path):
    (tmp_path / "a.yaml").write_text("algorithm: {name: grpo, num_stepz: 3}\n", encoding="utf-8")
    status, body = post(tmp_path, "/api/control/start", file="a.yaml", id="1")
    assert status == 422
    assert "num_stepz" in body["error"]
    assert "num_steps" in body["error"]
    assert not (tmp_path / "runs").exists()


def test_a_run_whose_name_has_marks_of_yaml_is_resumed_in_its_folder(tmp_path, monkeypatch):
    """The command that is started, read as the command line reads it."""
    name = "my run ü #1 100% 'q': {a"
    folder, commands = make_run(tmp_path / name, end={"outcome": "stopped", "error": ""}), []

    class Ended:
        pid, returncode = 1, 1

        def poll(self) -> int:
            return self.returncode

    def popen(command: list[str], **_: Any) -> Ended:
        commands.append(command)
        return Ended()

    monkeypatch.setattr("nemorl.ui.control.subprocess.Popen", popen)
    assert post(tmp_path, "/api/control/resume", run=name, id="1")[0] == 422  # it has ended at once
    ((*_, config, override, resume),) = commands
    field, _, text = override.partition("=")
    assert (config, field, resume) == (str(folder / "config.yaml"), "run_dir", "--resume")
    assert parse_value(text, "run_dir", ("run_dir",)) == str(folder)


def test_a_job_is_cancelled_only_if_there_is_one(tmp_path):
    make_run(tmp_path / "run")
    status, body = post(tmp_path, "/api/control/cancel", run="run")
    assert (status, body["error"]) == (409, "the run was not submitted to Slurm")


# Stand-ins for Slurm's commands: the job of the record runs until scancel without a signal.
SLURM = {
    "scontrol": '#!/bin/sh\n[ -n "$BROKEN" ] && { echo "Unable to contact slurm controller" >&2; exit 1; }\n'
    'echo "JobId=12 JobName=a JobState=$(cat state) Reason=None NodeList=n1 Restarts=0"\n',
    "scancel": '#!/bin/sh\necho "$@" >>commands\n'
    'case "$1" in --signal=TERM|12) echo CANCELLED >state;; esac\n',
}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The folder of a run that is a job on another host, with Slurm's commands first in PATH."""
    for name, text in SLURM.items():
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").write_text("RUNNING")
    folder = make_run(tmp_path / "run", pid=1, host="elsewhere", live={})
    words = ("sbatch", f"--output={tmp_path}/job.log", "config.yaml")
    Submission(words, {}, str(tmp_path), (str(folder),), job="12").record(folder)
    return folder


@pytest.mark.parametrize("config", ["algorithm: {num_steps: 9}\n", "algorithm: [\n", "run_dir: x\n"])
def test_a_job_of_another_host_is_cancelled_with_its_last_step(tmp_path, job, config):
    """`nemorl slurm cancel`: corrupt files of the run do not matter."""
    (job / "config.yaml").write_text(config, encoding="utf-8")
    (job / "metrics.jsonl").write_text("no JSON\n" if "[" in config else "", encoding="utf-8")
    state = get(tmp_path, "/api/watch/state", run="run")[1]
    assert (state["head"]["is_job"], state["head"]["is_here"], state["head"]["host"]) == (
        True,
        False,
        "elsewhere",
    )
    refused = post(tmp_path, "/api/control/stop", run="run")
    assert refused[1]["fix"] == "send SIGTERM to it on elsewhere, or cancel its job"

    assert post(tmp_path, "/api/control/cancel", run="run") == (200, {"jobs": ["job 12: CANCELLED"]})

    assert (tmp_path / "commands").read_text().splitlines()[-1] == "12"


def test_what_slurm_refuses_is_a_sentence(tmp_path, job, monkeypatch):
    monkeypatch.setenv("BROKEN", "1")
    status, body = post(tmp_path, "/api/control/cancel", run="run")
    assert (status, body["place"]) == (422, "run")
    assert "Unable to contact slurm controller" in body["error"]
    (job / "slurm" / "submissions.jsonl").write_text("no JSON\n", encoding="utf-8")
    status, body = post(tmp_path, "/api/control/cancel", run="run")
    assert (status, "line 1 is not JSON" in body["error"]) == (422, True)
    assert get(tmp_path, "/api/watch/state", run="run")[0] == 200


def test_an_unwritable_folder_starts_nothing_and_is_named(tmp_path, monkeypatch):
    """As root writes into every folder, the refusal of the system is made up."""
    folder = make_run(tmp_path / "run", end={"outcome": "stopped", "error": ""})
    opened = Path.open

    def refused(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if path.name == OUTPUT and "r" not in mode:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", refused)
    status, body = post(tmp_path, "/api/control/resume", run="run", id="1")
    assert (status, body["place"]) == (422, str(folder / "logs"))
    assert body["error"] == f"cannot write {folder / 'logs' / OUTPUT}: Permission denied"


def steps(folder: Path) -> int:
    path = RunPaths(folder).metrics
    return len(read_metrics(path)) if path.exists() else 0


async def until(reached: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


@pytest.mark.ci
def test_a_run_is_started_once_stopped_with_its_last_step_and_resumed(tmp_path, monkeypatch):
    """Two requests with one id start one process, which outlives the server."""
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))  # of the rewards
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = tiny_model(tmp_path / "model")
    algorithm = {"num_steps": 30, "validation": {"period": None, "at_start": False, "at_end": False}}
    layout = {"tensor_parallel_size": 1}
    write_experiment(tmp_path, model, "run", algorithm=algorithm, policy={"layout": layout})
    folder = tmp_path / "run"

    async def begin(client: Client) -> tuple[Any, Any]:
        body = {"file": "run.yaml", "id": "one"}
        answers = await asyncio.gather(
            *(client.post("/api/control/start", headers=KEY, json=body) for _ in range(2))
        )
        assert [answer.status for answer in answers] == [200, 200]
        first, second = [await answer.json() for answer in answers]
        return first, second

    first, second = asked(tmp_path, begin)
    assert first == second == {"run": "run", "pid": first["pid"]}
    assert os.getsid(first["pid"]) == first["pid"]

    async def stop(client: Client) -> None:  # another server: the first one is gone
        await until(lambda: steps(folder) >= 2)
        status = run_status(folder, read_header(RunPaths(folder).header))
        assert (status.state, status.driver.pid) == ("running", first["pid"])
        again = await client.post("/api/control/resume", headers=KEY, json={"run": "run", "id": "two"})
        assert again.status == 409
        answer = await client.post("/api/control/stop", headers=KEY, json={"run": "run"})
        assert (answer.status, await answer.json()) == (200, {"pid": first["pid"]})
        await until(lambda: run_status(folder, read_header(RunPaths(folder).header)).state == "stopped")

    asked(tmp_path, stop)
    stopped_after = steps(folder)
    assert 2 <= stopped_after < 30
    saved = max(int(path.name.removeprefix("step_")) for path in RunPaths(folder).checkpoints.glob("step_*"))
    assert saved == stopped_after

    async def resume(client: Client) -> None:
        answer = await client.post("/api/control/resume", headers=KEY, json={"run": "run", "id": "three"})
        assert answer.status == 200, await answer.text()
        await until(lambda: run_status(folder, read_header(RunPaths(folder).header)).state == "complete")

    asked(tmp_path, resume)
    assert [step.step for step in read_metrics(RunPaths(folder).metrics)] == [*range(1, 31)]
    assert "step 30/30" in (RunPaths(folder).logs / OUTPUT).read_text(encoding="utf-8")
    starts = json.loads(RunPaths(folder).header.read_text(encoding="utf-8"))
    assert [start["resumed_step"] for start in starts] == [None, saved]
