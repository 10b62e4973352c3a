"""Looking into a job: its logs, and a shell on one of its nodes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .errors import SlurmError
from .jobs import ACTIVE, call, jobs
from .ray_node import OF_ANOTHER_RAY, secret_environment
from .status import Row, plan, rows, starts, submitted

CANCEL_SECONDS = 300.0
POLL_SECONDS = 1.0


def show_log(path: Path, *, lines: int, follow: bool) -> int:
    """Print the end of a file; with `follow` also what comes, and a file that does not exist yet."""
    if not follow and not path.exists():
        raise SlurmError(
            f"{path} is not there yet: the job has not begun, or Slurm could not write it; `nemorl slurm "
            "status` says more"
        )
    words = ["tail", f"--lines={lines}", *(["--follow=name", "--retry"] if follow else []), str(path)]
    try:
        return subprocess.run(words).returncode
    except KeyboardInterrupt:  # how following ends
        return 0


def attach(run_dir: Path, words: Sequence[str], node: str | None) -> int:
    """A shell, or a command, beside what runs on a node; Ray's commands find the job's Ray there.

    Raises `SlurmError` where the job does not run.
    """
    submission = submitted(run_dir)
    found = jobs(submission.job)
    if submission.tasks:
        raise SlurmError(f"{run_dir} is a sweep: name the run folder of one of its tasks")
    if not found or found[0].state != "RUNNING":
        state = found[0].state.lower() if found else "over"
        raise SlurmError(f"job {submission.job} is {state}: a shell can be opened in one that runs")
    start = next(reversed(starts(run_dir, submission.job)), None)
    decided = plan(start) if start else None
    if decided is None or start is None:
        raise SlurmError(f"job {submission.job} has just begun, and its nodes are still coming together")
    nodes = list(decided.ports)
    if node is not None and node not in nodes:
        raise SlurmError(f"{node} is no node of job {submission.job}; there are {', '.join(nodes)}")
    inherited = {name: value for name, value in os.environ.items() if name not in OF_ANOTHER_RAY}
    environment = {**inherited, **secret_environment(start), "RAY_ADDRESS": decided.gcs}
    command = ["srun", f"--jobid={found[0].number}", "--overlap", "--nodes=1", "--ntasks=1"]
    command += [f"--nodelist={node or nodes[0]}", f"--chdir={submission.folder}", "--mpi=none"]
    command += ["--export=ALL"]
    if submission.cpu_nodes:  # they are the last
        command += [f"--het-group={int(node in nodes[-submission.cpu_nodes :])}"]
    command += _environment_of(submission.variables, submission.folder, environment)
    command += ["--pty"] * sys.stdin.isatty()
    return subprocess.run([*command, *(words or ["bash"])], env=environment).returncode


def cancel(run_dir: Path) -> list[Row]:
    """End the job of a run folder and wait for it; what became of it. Raises `SlurmError`.

    The launchers are told first: Slurm's own cancelling leaves a run half a minute to save its last step.
    """
    job = submitted(run_dir).job
    if any(_hears(row) for row in rows(run_dir)):
        call(["scancel", "--state=PENDING", job])  # tasks of a sweep, that would begin when others end
        call(["scancel", "--signal=TERM", job])
        _until(lambda: not any(row.state == "RUNNING" for row in rows(run_dir)))
    call(["scancel", job])
    if not _until(lambda: not any(row.state in ACTIVE for row in rows(run_dir))):
        raise SlurmError(
            f"job {job} was told to end and has not after {CANCEL_SECONDS:g} s: see `nemorl slurm logs "
            f"{run_dir}`; an administrator can take its nodes back"
        )
    return rows(run_dir)


def _hears(row: Row) -> bool:
    """Whether the launchers of a job are there; before, it has nothing to save."""
    own = starts(row.run_dir, row.job)
    return row.state == "RUNNING" and bool(own) and plan(own[-1]) is not None


def _until(reached: Callable[[], bool]) -> bool:
    end = time.monotonic() + CANCEL_SECONDS
    while not (done := reached()) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return done


def _environment_of(variables: Mapping[str, str], folder: str, environment: dict[str, str]) -> list[str]:
    """The container of the job, by further words for srun, or its environment's programs first in PATH."""
    image, mounts = variables.get("NEMORL_CONTAINER"), variables.get("NEMORL_MOUNTS")
    if image:
        listed = f"{folder}:{folder}" + (f",{mounts}" if mounts else "")
        return [f"--container-image={image}", f"--container-mounts={listed}", f"--container-workdir={folder}"]
    if programs := variables.get("NEMORL_ENV"):
        environment["PATH"] = f"{programs}/bin:{environment.get('PATH', os.defpath)}"
    return []
