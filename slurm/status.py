"""A submitted run seen from outside: where it is, what it said, how it ended."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from nemorl.observe.files import read_json_lines
from nemorl.observe.run_folder import RunPaths

from .errors import SlurmError
from .jobs import Job, jobs
from .records import Ending
from .rendezvous import FOLDER, PLAN, Plan
from .submission import Submission, latest


@dataclass(frozen=True)
class Row:
    """A line of `nemorl slurm status`."""

    job: str
    state: str
    nodes: str
    step: str
    restarts: int
    why: str
    run_dir: Path


def submitted(run_dir: Path) -> Submission:
    """The newest submission of a run folder. Raises `SlurmError`."""
    found = latest(run_dir)
    if found is None:
        raise SlurmError(
            f"{run_dir} was not submitted with `nemorl slurm submit`: there is no job to look at"
        )
    return found


def rows(run_dir: Path) -> list[Row]:
    """One for the job, or one for each task of a sweep. Raises `SlurmError`."""
    submission = submitted(run_dir)
    there = jobs(submission.job)
    if not submission.tasks:
        return [_row(submission, run_dir, there)]
    return [
        _row(
            submission.task(index),
            folder,
            [job for job in there if job.is_task(index)],
        )
        for index, folder in enumerate(submission.folders)
    ]


def starts(run_dir: Path, job: str = "*") -> list[Path]:
    """The folders of all starts of a run, or of those by one job, the newest last."""
    return sorted(
        (path for path in (run_dir / FOLDER).glob(f"{job}.*") if path.is_dir()),
        key=lambda path: path.stat().st_mtime,
    )


def plan(start: Path) -> Plan | None:
    """Where everybody listens in a start; None before it is decided."""
    try:
        found = Plan.read(json.loads((start / PLAN).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    return None if found.refused else found


def logs(run_dir: Path) -> dict[str, Path]:
    """What can be read of a run, by name: the job's output, each rank, each node of the newest start."""
    found: dict[str, Path] = {}
    submission = latest(run_dir)
    if submission is not None and submission.tasks:
        found |= {f"job-{i}": submission.task(i).log for i in range(len(submission.run_dirs))}
    elif submission is not None:
        found["job"] = submission.log
    found |= {path.stem: path for path in sorted(RunPaths(run_dir).logs.glob("*.log"))}
    newest = starts(run_dir)[-1:]
    found |= {path.stem: path for start in newest for path in sorted(start.glob("*.log"))}
    return found


def _row(submission: Submission, run_dir: Path, there: Sequence[Job]) -> Row:
    """Of the records of a job, of which a heterogeneous one has several."""
    number = submission.job
    ending = next((e for start in reversed(starts(run_dir, number)) if (e := Ending.read(start))), None)
    if not there:
        why = ending.reason if ending else "Slurm has forgotten it, and it left no word: see its output"
        return Row(number, "ended", "", _step(run_dir), 0, _first_line(why), run_dir)
    job, nodes = there[0], ",".join(part.nodes for part in there)
    why = job.reason
    if ending and not job.active:
        why = ending.reason
    elif job.ending:  # before the launcher could leave a word
        why = f"{job.ending}: see {submission.log}"
    return Row(number, job.state, nodes, _step(run_dir), job.restarts, _first_line(why), run_dir)


def _step(run_dir: Path) -> str:
    """Of the newest figures, and of all: `12/300`."""
    lines = read_json_lines(RunPaths(run_dir).metrics)
    done = max((int(line.get("step", 0)) for line in lines), default=0)
    total = _num_steps(run_dir)
    return f"{done}/{total}" if total else str(done)


def _num_steps(run_dir: Path) -> int | None:
    for path in (RunPaths(run_dir).config, run_dir / FOLDER / "config.yaml"):
        if path.exists():
            tree: Mapping[str, Mapping[str, int]] = yaml.safe_load(path.read_text(encoding="utf-8"))
            return tree["algorithm"].get("num_steps")
    return None


def _first_line(text: str) -> str:
    return re.split(r"\n", text, maxsplit=1)[0]
