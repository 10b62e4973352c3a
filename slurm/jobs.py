"""Slurm's own commands, and what they report about jobs and nodes."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import SlurmError

COMMAND_SECONDS = 60.0
QUICK_SECONDS = 5.0  # where SIGKILL comes 30 s later
OUT_OF_TIME = "time limit"
ACTIVE = {
    *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "COMPLETING"),
    *("STAGE_OUT", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
}


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array: a record of `scontrol show job`."""

    fields: Mapping[str, str]

    @classmethod
    def parse(cls, line: str) -> "Job":
        """Parse a line of `scontrol show job --oneliner`: `Name=value` words; values may have spaces."""
        words = re.split(r"\s(?=[A-Za-z][A-Za-z0-9/:_]*=)", line.strip())
        return cls(dict(word.split("=", 1) for word in words))

    @property
    def state(self) -> str:
        return self.fields.get("JobState", "UNKNOWN")

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def nodes(self) -> str:
        """Slurm's list of the node names; their number before it runs."""
        names = self.fields.get("NodeList", "")
        return names if names and names != "(null)" else self.fields.get("NumNodes", "").partition("-")[0]

    @property
    def restarts(self) -> int:
        return int(self.fields.get("Restarts", "0"))

    @property
    def reason(self) -> str:
        reason = self.fields.get("Reason", "None")
        if self.state == "PENDING":
            return "" if reason == "None" else reason
        if self.is_active or self.state in ("COMPLETED", "CANCELLED"):
            return ""
        code, _, signal = self.fields.get("ExitCode", "").partition(":")
        named = {"exit status": code, "signal": signal, "Slurm's reason:": reason}
        return ", ".join(f"{name} {word}" for name, word in named.items() if word not in ("", "0", "None"))

    def has_task(self, index: int) -> bool:
        """True where this is the record of a task of an array, or of several waiting ones including it."""
        tasks = self.fields.get("ArrayTaskId", "").partition("%")[0]
        ranges = re.finditer(r"(\d+)(?:-(\d+))?", tasks)
        return any(int(found[1]) <= index <= int(found[2] or found[1]) for found in ranges)

    def why_terminated(self, restart: int) -> str:
        """Why a start of the job received SIGTERM; `restart` is the number of restarts before that start."""
        if self.fields.get("Reason") == "TimeLimit":
            return OUT_OF_TIME
        if self.fields.get("PreemptTime", "None")[:1].isdecimal():
            return "pre-empted"
        if self.restarts > restart:  # Slurm counts it before the processes have ended
            return "pre-empted, or requeued by hand"
        return "cancelled" if self.state in ("CANCELLED", "COMPLETING") else "signal sent by a user"


def find_jobs(job: str, seconds: float = COMMAND_SECONDS) -> list[Job]:
    """Return the records of a job: one, or one per task or component; empty where Slurm has forgotten it."""
    answer = call(["scontrol", "show", "job", "--oneliner", job], check=False, seconds=seconds)
    if answer.returncode != 0:
        # Slurm answers differently for a task of an array.
        if "Invalid job id" in answer.stderr or f"Job {job} not found" in answer.stdout:
            return []
        raise SlurmError(f"`scontrol show job {job}` failed: {answer.stderr.strip()}")
    return [Job.parse(line) for line in answer.stdout.splitlines() if line.startswith("JobId=")]


def largest_node_cpus(partition: str | None) -> int:
    """CPUs of the largest node of a partition, or of the cluster; 0 where Slurm does not say."""
    command = ["sinfo", "--noheader", "--exact", "--format=%c"]
    command += [f"--partition={partition}"] * (partition is not None)
    try:
        answer = call(command, seconds=QUICK_SECONDS)
    except SlurmError:
        return 0
    return max((int(word) for word in answer.stdout.split() if word.isdecimal()), default=0)


def why_terminated(job: str, nodes: Sequence[str], restart: int) -> str:
    """Why a start of a job received SIGTERM, according to Slurm; empty where Slurm cannot be asked."""
    command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T|%E"]
    try:
        answer = call(command, seconds=QUICK_SECONDS)
        jobs = find_jobs(job, seconds=QUICK_SECONDS)
    except SlurmError:
        return ""
    if lost := lost_nodes(answer.stdout):
        return f"node {', '.join(lost)} is lost"
    return jobs[0].why_terminated(restart) if jobs else ""


def lost_nodes(output: str) -> list[str]:
    """Nodes that Slurm cannot use, from lines `name|state|reason`; `*` after a state means no response."""
    rows = (line.split("|", 2) for line in dict.fromkeys(output.splitlines()))
    bad = ("down", "fail", "unk", "power")
    lost = (row for row in rows if row[1].endswith("*") or row[1].startswith(bad))
    return [f"{name} ({state}: {reason})" for name, state, reason in lost]


def call(
    command: Sequence[str],
    *,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    seconds: float = COMMAND_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. Raises `SlurmError` if it is missing, or fails and `check` is set."""
    if shutil.which(command[0]) is None:
        fix = "Run this on a machine that submits jobs, such as a login node of the cluster."
        raise SlurmError(f"`{command[0]}` is not installed here. {fix}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        problem = f"`{command[0]}` did not answer within {seconds:g} s: Slurm's controller is busy or down."
        raise SlurmError(problem) from None
    if check and answer.returncode != 0:
        lines = [re.sub(r"^\w+: (error: )?", "", line) for line in answer.stderr.strip().splitlines()]
        raise SlurmError(f"`{command[0]}` failed: {'; '.join(lines)}")
    return answer
