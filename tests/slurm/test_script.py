"""What the batch script does at the end of a run; Slurm's commands are stubs."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemorl.slurm.submission import SCRIPT

# `srun` ends with the next of the statuses; the launcher on the head writes HEAD into the status file.
COMMANDS = {
    "srun": 'read -r status rest <statuses; echo "$rest" >statuses; echo srun "$NEMORL_JOB" >>commands\n'
    'echo "$@" >words; [ -n "$HEAD" ] && echo "$HEAD" >"$NEMORL_STATUS_FILE"; exit "$status"',
    "scontrol": 'case "$*" in\n'
    '*hostnames*) printf "n1\\nn2\\n";; *"show job"*) echo "$FACTS";; *) echo "$@" >>commands;; esac',
    "scancel": 'echo scancel "$@" >>commands',
    "sinfo": "",
    "sleep": "",
}
RUNNING = "JobId=12 JobName=a JobState=RUNNING Reason=None Dependency=(null) PreemptTime=None Nodes=n1"
PRE_EMPTED = RUNNING.replace("PreemptTime=None", "PreemptTime=2026-11-22T02:00:00")
OUT_OF_TIME = RUNNING.replace("RUNNING Reason=None", "COMPLETING Reason=TimeLimit")
CANCELLED = RUNNING.replace("RUNNING", "CANCELLED")
REQUEUED = RUNNING.replace("RUNNING", "PENDING")  # by Slurm itself


@dataclass
class Script:
    """The script, run in a folder."""

    folder: Path

    def ends(self, facts: str, *, statuses: str = "0", head: str = "", **variables: str) -> int:
        """Run it; return its exit status. `facts` is what `scontrol show job` prints."""
        (self.folder / "statuses").write_text(f"{statuses}\n")
        given = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "FACTS": facts, "HEAD": head}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        command = ["bash", str(SCRIPT), "config.yaml"]
        return subprocess.run(command, cwd=self.folder, env={**given, "PATH": path, **variables}).returncode

    @property
    def commands(self) -> list[str]:
        """The commands to Slurm, without queries."""
        return (self.folder / "commands").read_text().splitlines()


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """The script with the stubs first in PATH."""
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return Script(tmp_path)


@pytest.mark.parametrize(
    ("head", "facts", "code", "commands"),
    [
        ("0", RUNNING, 0, []),
        ("1", RUNNING, 1, []),
        ("75", RUNNING, 75, ["requeue 12"]),
        ("75", OUT_OF_TIME, 75, ["requeue 12"]),
        ("75", CANCELLED, 75, []),
        ("75", REQUEUED, 75, []),
        ("143", OUT_OF_TIME, 75, ["requeue 12"]),
        ("143", PRE_EMPTED, 75, ["requeue 12"]),
        ("143", PRE_EMPTED.replace("RUNNING", "CANCELLED"), 143, []),
        ("143", CANCELLED, 143, []),
        ("143", RUNNING, 143, ["scancel 12"]),
    ],
)
def test_what_becomes_of_the_job(
    script: Script, head: str, facts: str, code: int, commands: list[str]
) -> None:
    """The launcher's exit status counts, not srun's; and what Slurm has decided stays."""
    assert script.ends(facts, statuses="137", head=head) == code
    assert script.commands == ["srun 12", *commands]


def test_a_task_of_an_array_is_never_the_whole_array(script: Script) -> None:
    """One of the tasks has the id of the array as its own."""
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert script.ends(RUNNING, head="75", **array) == 75
    assert script.commands == ["srun 12_3", "requeue 12_3"]


def test_a_step_that_a_node_does_not_begin_is_retried(script: Script) -> None:
    assert script.ends(RUNNING, statuses="168 168 0") == 0
    assert script.commands == ["srun 12"] * 3


def test_an_environment_without_nemorl_is_refused(script: Script) -> None:
    """PATH might have another nemorl."""
    assert script.ends(RUNNING, NEMORL_ENV="/nope") == 2
    assert not (script.folder / "commands").exists()


def test_tasks_inherit_the_environment_whatever_a_site_sets(script: Script) -> None:
    assert script.ends(RUNNING, SLURM_EXPORT_ENV="NONE") == 0
    assert (script.folder / "words").read_text().startswith("--export=ALL ")
