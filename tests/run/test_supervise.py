"""`nemorl train --supervise`: which ends are restarted, how often, and what is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.run.runs import finish, lines, start, tiny_model, write_experiment

# Supervises a script in the place of the run.
SUPERVISE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from nemorl.commands import supervise
sys.executable, folder, stall, orphan_seconds = sys.argv[1:]
supervise.ORPHAN_SECONDS = float(orphan_seconds)
saving = SimpleNamespace(memory_dir=Path(folder) / "memory")
cluster = SimpleNamespace(deadlines=SimpleNamespace(stall=float(stall)))
experiment = SimpleNamespace(run_dir=Path(folder), checkpointing=saving, cluster=cluster)
sys.exit(supervise.Supervisor(experiment, ["run.yaml"]).run(resume=False))
"""

Supervise = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def supervise(tmp_path: Path) -> Supervise:
    """Supervise shell lines as the run; `$N` is the number of the start, the arguments are in `starts`."""

    def run(
        script: str, max_restarts: int, stall: float = 1000.0, orphans: float = 0.5
    ) -> "subprocess.CompletedProcess[str]":
        path = tmp_path / "run.sh"
        count = f'echo "$*" >> {tmp_path}/starts; N=$(wc -l < {tmp_path}/starts)'
        path.write_text(
            f"#!/bin/bash\n{count}\nmkdir -p {tmp_path}/checkpoints\n{script}\n", encoding="utf-8"
        )
        path.chmod(0o755)
        return subprocess.run(
            [sys.executable, "-c", SUPERVISE, str(path), str(tmp_path), str(stall), str(orphans)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "NEMORL_MAX_RESTARTS": str(max_restarts)},
        )

    return run


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text(encoding="utf-8").splitlines()


def test_starts_without_a_new_checkpoint_are_bounded(tmp_path: Path, supervise: Supervise) -> None:
    done = supervise("exit 1", max_restarts=2)
    assert done.returncode == 1
    first = "-m nemorl.cli train run.yaml"
    assert starts(tmp_path) == [first, f"{first} --resume", f"{first} --resume"]
    assert "3 starts in a row wrote no new checkpoint (NEMORL_MAX_RESTARTS = 2): giving up" in done.stderr


def test_a_new_checkpoint_is_progress(tmp_path: Path, supervise: Supervise) -> None:
    script = f"[ $N = 4 ] && exit 0; mkdir {tmp_path}/checkpoints/step_0000000$N; exit 1"
    done = supervise(script, max_restarts=0)
    assert done.returncode == 0
    assert len(starts(tmp_path)) == 4
    assert "failed (exit status 1); newest checkpoint: step 3. Restarting" in done.stderr


def test_a_checkpoint_in_memory_is_progress(tmp_path: Path, supervise: Supervise) -> None:
    memory = f"echo kept > {tmp_path}/checkpoints/memory; mkdir -p {tmp_path}/memory/kept/step_0000000$N"
    done = supervise(f"[ $N = 4 ] && exit 0; {memory}; exit 1", max_restarts=0)
    assert done.returncode == 0
    assert "failed (exit status 1); newest checkpoint: step 3. Restarting" in done.stderr


def test_the_same_checkpoint_again_is_no_progress(tmp_path: Path, supervise: Supervise) -> None:
    """As of a run whose newest checkpoint turns out to be corrupt, which a resume renames."""
    folder = f"{tmp_path}/checkpoints/step_00000002"
    done = supervise(
        f"[ -e {folder} ] && mv {folder} {folder}.corrupt || mkdir {folder}; exit 1", max_restarts=1
    )
    assert done.returncode == 1
    assert len(starts(tmp_path)) == 3


@pytest.mark.parametrize(("errors", "count"), [(["a", "a"], 2), (["a", "b", "b"], 3), (["a", "", "a"], 4)])
def test_an_error_that_recurs_is_not_tried_again(
    tmp_path: Path, supervise: Supervise, errors: list[str], count: int
) -> None:
    """The last start fails before it adds an entry to the header."""
    for number in range(1, len(errors) + 1):
        entries = [{"end": {"error": error}} if error else {} for error in errors[:number]]
        (tmp_path / f"header-{number}").write_text(json.dumps(entries), encoding="utf-8")
    done = supervise(f"cp {tmp_path}/header-$N {tmp_path}/header.json; exit 1", max_restarts=3)
    assert done.returncode == 1
    assert len(starts(tmp_path)) == count
    assert ("had the same error: giving up" in done.stderr) == (count < 4)


@pytest.mark.parametrize("status", [0, 2, 75, 130])
def test_an_end_that_a_restart_cannot_change(tmp_path: Path, supervise: Supervise, status: int) -> None:
    assert supervise(f"exit {status}", max_restarts=3).returncode == status
    assert len(starts(tmp_path)) == 1


def test_what_a_killed_run_leaves_is_ended(tmp_path: Path, supervise: Supervise) -> None:
    script = f"sleep 1000 & echo $! > {tmp_path}/orphan; kill -STOP $!; kill -9 $$"
    done = supervise(script, max_restarts=0)
    assert done.returncode == 1
    assert "was killed by SIGKILL; no checkpoint yet" in done.stderr
    assert not psutil.pid_exists(int((tmp_path / "orphan").read_text(encoding="utf-8")))


def test_agents_of_ray_are_not_waited_for(tmp_path: Path, supervise: Supervise) -> None:
    agents = "".join(f"(exec -a ray::{name} sleep 1000) & " for name in ("DashboardAgent", "RuntimeEnvAgent"))
    done = supervise(f"{agents} sleep 0.5; kill -9 $$", max_restarts=0, orphans=1000)
    assert "The run was killed by SIGKILL" in done.stderr


def test_a_driver_that_stays_stopped_is_restarted(tmp_path: Path, supervise: Supervise) -> None:
    done = supervise("[ $N = 2 ] && exit 0; kill -STOP $$", max_restarts=1, stall=0.1)
    assert done.returncode == 0
    assert len(starts(tmp_path)) == 2
    assert "The driver is stopped by SIGSTOP: kill -CONT " in done.stderr
    assert "The run was killed by SIGKILL; no checkpoint yet. Restarting with --resume." in done.stderr


@pytest.mark.parametrize(("sent", "status"), [("kill -CONT $$", 0), ("kill $PPID", 75)])
def test_a_stopped_driver_may_continue(tmp_path: Path, supervise: Supervise, sent: str, status: int) -> None:
    """By a signal from others, or one to the supervisor."""
    script = f"trap 'exit 75' TERM; (sleep 0.5; {sent}) & kill -STOP $$"
    assert supervise(script, max_restarts=1).returncode == status
    assert len(starts(tmp_path)) == 1


def test_a_killed_driver_is_restarted_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    saving = {"period": 2, "memory_period": 1, "memory_dir": str(memory)}
    config = write_experiment(tmp_path, tiny_model(tmp_path / "model"), "run", checkpointing=saving)
    supervisor = start("train", config, "--supervise")
    while len(lines(run)) < 3:
        assert supervisor.poll() is None, supervisor.communicate()[0]
        time.sleep(0.05)
    # Not by its parent, which also adopts orphans of the run.
    driver = psutil.Process(int((run / ".lock").read_text().split()[0]))
    assert driver.ppid() == supervisor.pid
    family = driver.children(recursive=True)
    driver.send_signal(signal.SIGKILL)
    status, output = finish(supervisor)
    assert status == 0, output
    # Of the step in memory, or the one on disk while that of a later step was being written.
    assert re.search(r"The run was killed by SIGKILL; .*step \d\. Restarting with --resume\.", output), output
    assert [step.step for step in lines(run)] == [1, 2, 3, 4, 5, 6]
    assert [process.pid for process in family if process.is_running()] == []
    assert list(memory.iterdir()) == []
