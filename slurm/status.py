"""Submitted runs seen from outside: status, logs, a shell on a node, cancelling."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from nemorl.observe.files import RunFolderError, read_json_lines
from nemorl.observe.run_folder import RunPaths

from . import SlurmError
from .jobs import ACTIVE, Job, call, find_jobs
from .ray_node import RAY_VARIABLES, token_environment
from .start import CANCELLED, FOLDER, REQUEUE, ExitRecord, Plan
from .submission import Submission, latest_submission

CANCEL_SECONDS = 300.0
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Row:
    job: str
    state: str
    nodes: str
    step: str
    restarts: int
    reason: str
    run_dir: Path

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE


def find_submission(run_dir: Path) -> Submission:
    """The newest submission of a run folder. Raises `SlurmError` without one."""
    if (found := latest_submission(run_dir)) is None:
        raise SlurmError(f"{run_dir} was not submitted with `nemorl slurm submit`: it has no job.")
    return found


def status_rows(run_dir: Path) -> list[Row]:
    """One row for the job, or one for each task of a sweep. Raises `SlurmError`."""
    submission = find_submission(run_dir)
    jobs = find_jobs(submission.job)
    if not submission.is_sweep:
        return [_row(submission, run_dir, jobs)]
    return [
        _row(submission.task(index), folder, [job for job in jobs if job.has_task(index)])
        for index, folder in enumerate(submission.folders)
    ]


def _row(submission: Submission, run_dir: Path, jobs: Sequence[Job]) -> Row:
    starts = reversed(_starts(run_dir, submission.job))
    record = next((found for start in starts if (found := ExitRecord.read(start))), None)
    job = jobs[0] if jobs else Job({"JobState": "ended"})
    if job.state == "CANCELLED" and (record is None or record.code == REQUEUE):
        # While it waited: a record that asks for another start is that of an earlier start.
        reason = f"cancelled before {'its next start' if record else 'it started'}"
    elif record and not job.is_active:
        reason = record.reason
    elif not jobs:
        reason = f"Slurm has no record of it; see {submission.log}"
    else:
        reason = job.reason
        if reason and not job.is_active:  # it ended before the launcher could write a record
            reason = f"{reason}; see {submission.log}"
    nodes, first_line = ",".join(job.nodes for job in jobs), reason.partition("\n")[0]
    return Row(submission.job, job.state, nodes, _step(run_dir), job.restarts, first_line, run_dir)


def _step(run_dir: Path) -> str:
    """The newest step with metrics, and the number of steps: `12/300`; empty if the metrics are corrupt."""
    try:
        lines = read_json_lines(RunPaths(run_dir).metrics)
    except RunFolderError:  # a job whose files are corrupt can still be cancelled
        return ""
    done = max((int(line.get("step", 0)) for line in lines), default=0)
    for path in (RunPaths(run_dir).config, run_dir / FOLDER / "config.yaml"):
        if path.exists():
            with suppress(ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError):
                total = yaml.safe_load(path.read_text(encoding="utf-8"))["algorithm"].get("num_steps")
                return f"{done}/{total}" if total else str(done)
    return str(done)


def _starts(run_dir: Path, job: str = "*") -> list[Path]:
    """The folders of all starts of a run, or of one of its jobs, the newest last."""
    folders = [path for path in (run_dir / FOLDER).glob(f"{job}.*") if path.is_dir()]
    return sorted(folders, key=lambda path: path.stat().st_mtime)


def _running_start(run_dir: Path, job: str) -> tuple[Path, Plan] | None:
    """The newest start of a job and its plan; None before the head has written it, or where it refused."""
    with suppress(FileNotFoundError, IndexError):
        start = _starts(run_dir, job)[-1]
        if not (plan := Plan.read(start)).refused:
            return start, plan
    return None


def find_logs(run_dir: Path) -> dict[str, Path]:
    logs: dict[str, Path] = {}
    submission = latest_submission(run_dir)
    if submission is not None and submission.is_sweep:
        logs |= {f"job-{i}": submission.task(i).log for i in range(len(submission.run_dirs))}
    elif submission is not None:
        logs["job"] = submission.log
    for folder in (RunPaths(run_dir).logs, *_starts(run_dir)[-1:]):
        logs |= {path.stem: path for path in sorted(folder.glob("*.log"))}
    return logs


def show_log(path: Path, *, lines: int, follow: bool) -> int:
    """Print the end of a file; with `follow` also what is added, even to a file that does not exist yet."""
    if not follow and not path.exists():
        problem = f"{path} does not exist yet: the job has not started, or Slurm could not write it"
        raise SlurmError(f"{problem}. Run `nemorl slurm status`.")
    command = ["tail", f"--lines={lines}", *(["--follow=name", "--retry"] if follow else []), str(path)]
    try:
        return subprocess.run(command).returncode
    except KeyboardInterrupt:  # ends --follow
        return 0


def attach(run_dir: Path, command: Sequence[str], node: str | None) -> int:
    """Run a shell, or a command, on a node of a running job, with its Ray. Raises `SlurmError`."""
    submission = find_submission(run_dir)
    if submission.is_sweep:
        raise SlurmError(f"{run_dir} is a sweep: give the run folder of one of its tasks.")
    jobs = find_jobs(submission.job)
    if not jobs or jobs[0].state != "RUNNING":
        state = jobs[0].state.lower() if jobs else "over"
        raise SlurmError(f"job {submission.job} is {state}: attach works while it runs.")
    if (running := _running_start(run_dir, submission.job)) is None:
        raise SlurmError(f"job {submission.job} is still starting: its nodes have not reported yet.")
    start, plan = running
    nodes = list(plan.ports)
    if node is not None and node not in nodes:
        raise SlurmError(f"{node} is not a node of job {submission.job}; its nodes are {', '.join(nodes)}.")
    inherited = {name: value for name, value in os.environ.items() if name not in RAY_VARIABLES}
    environment = {**inherited, **token_environment(start), "RAY_ADDRESS": plan.gcs}
    srun = ["srun", f"--jobid={jobs[0].fields['JobId']}", "--overlap", "--nodes=1", "--ntasks=1"]
    srun += [f"--nodelist={node or nodes[0]}", f"--chdir={submission.folder}", "--mpi=none", "--export=ALL"]
    if submission.cpu_nodes:  # the last ones
        srun.append(f"--het-group={int(node in nodes[-submission.cpu_nodes :])}")
    variables, folder = submission.variables, submission.folder
    if image := variables.get("NEMORL_CONTAINER"):
        mounts = ",".join([f"{folder}:{folder}", *filter(None, [variables.get("NEMORL_MOUNTS")])])
        srun += [f"--container-image={image}", f"--container-mounts={mounts}"]
        srun.append(f"--container-workdir={folder}")
    elif programs := variables.get("NEMORL_ENV"):
        environment["PATH"] = f"{programs}/bin:{environment.get('PATH', os.defpath)}"
    srun += ["--pty"] * sys.stdin.isatty()
    return subprocess.run([*srun, *(command or ["bash"])], env=environment).returncode


def cancel(run_dir: Path) -> list[Row]:
    """Cancel the job of a run folder and wait for its end; return its rows. Raises `SlurmError`."""
    job = find_submission(run_dir).job
    rows = [row for row in status_rows(run_dir) if row.state == "RUNNING"]
    # Before the plan there is nothing to save.
    running = [found[0] for row in rows if (found := _running_start(row.run_dir, row.job))]
    for start in running:
        (start / CANCELLED).touch()  # the launcher reports this as the reason
    if running:  # `scancel` alone leaves a run half a minute to save its last step
        call(["scancel", "--state=PENDING", job])  # waiting tasks of a sweep, before the running ones end
        call(["scancel", "--signal=TERM", job])
        _wait(lambda: not any(row.state == "RUNNING" for row in status_rows(run_dir)))
    call(["scancel", job])
    if not _wait(lambda: not any(row.is_active for row in status_rows(run_dir))):
        problem = f"job {job} has not ended {CANCEL_SECONDS:g} s after it was cancelled"
        fix = f"see `nemorl slurm logs {run_dir}`, or ask an administrator to free its nodes."
        raise SlurmError(f"{problem}: {fix}")
    return status_rows(run_dir)


def _wait(is_reached: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + CANCEL_SECONDS
    while not (reached := is_reached()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return reached
