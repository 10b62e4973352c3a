"""What Slurm says of jobs: its own commands, asked and read."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import SlurmError

COMMAND_SECONDS = 60.0
QUICK_SECONDS = 5.0  # for what is told 30 s before SIGKILL
OUT_OF_TIME = "out of time"
ACTIVE = {
    *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "COMPLETING"),
    *("STAGE_OUT", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
}

# Why a job waits, in words; https://slurm.schedmd.com/job_reason_codes.html has them all.
REASONS = {
    "Resources": "waits until enough nodes are free",
    "Priority": "other jobs are before it",
    "BeginTime": "queued again; Slurm waits a little before it starts it",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "the job that it waits for failed: cancel it and submit it again",
    "Licenses": "waits for a license",
    "Reservation": "waits for its reservation",
    "Prolog": "the nodes are being prepared",
    "JobArrayTaskLimit": "as many tasks of the sweep run as may at once",
    "JobHeldUser": "held: `scontrol release` lets it go",
    "JobHeldAdmin": "held by an administrator",
    "JobRequeueHold": "held after it was queued again: `scontrol release` lets it go",
    "launch failed requeued held": "its start failed on a node and it is held: `scontrol release` lets it go",
    "PartitionTimeLimit": "its time is longer than the partition allows: lower --time",
    "PartitionNodeLimit": "it wants more nodes than the partition gives a job: lower --nodes",
    "PartitionConfig": "the partition cannot give it that many nodes, or that time: lower --nodes or --time",
    "JobLaunchFailure": "it could not be started on its nodes: see the job's output, `scontrol show job`",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs to start now",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "AccountNotAllowed": "the partition does not take your account: see --account",
    "QOSNotAllowed": "the partition does not take the QOS of the job: see --sbatch=--qos=…",
    "InvalidAccount": "there is no such account: see --account",
    "InvalidQOS": "there is no such QOS: see --sbatch=--qos=…",
    "NodeNotAvail": "nodes that it needs are down, drained or reserved",
    "QOSMaxNodePerUserLimit": "you use as many nodes as the QOS allows",
    "QOSMaxWallDurationPerJobLimit": "its time is longer than the QOS allows: lower --time",
    "AssocMaxWallDurationPerJobLimit": "its time is longer than your account may ask for: lower --time",
    "BadConstraints": "no node has what it asks for: see its options",
    "AssociationJobLimit": "your account runs as many jobs as it may",
    "AssocMaxJobsLimit": "your account runs as many jobs as it may",
    "AssocGrpGRES": "your account uses as many GPUs as it may",
    "QOSMaxGRESPerUser": "you use as many GPUs as the QOS allows",
    "QOSMaxJobsPerUserLimit": "you run as many jobs as the QOS allows",
    "MaxRequeue": "queued again as often as Slurm allows",
}


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array, as `scontrol show job` has it."""

    facts: Mapping[str, str]

    @property
    def number(self) -> str:
        """Its own, also where it is a task of an array."""
        return self.facts.get("JobId", "")

    @property
    def state(self) -> str:
        """Such as `RUNNING`."""
        return self.facts.get("JobState", "UNKNOWN")

    @property
    def active(self) -> bool:
        """Whether it runs, or may still."""
        return self.state in ACTIVE

    @property
    def nodes(self) -> str:
        """Names, as Slurm writes lists of them; before it runs their number."""
        names = self.facts.get("NodeList", "")
        return names if names and names != "(null)" else self.facts.get("NumNodes", "").partition("-")[0]

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return int(self.facts.get("Restarts", "0"))

    @property
    def reason(self) -> str:
        """Why it waits, in words; Slurm's own where there are none."""
        code = self.facts.get("Reason", "None")
        if self.state != "PENDING" or code == "None":
            return ""
        known = REASONS.get(code) or REASONS.get(code.partition(",")[0].strip("()"))
        return known or f"Slurm's reason is {code.replace('_', ' ')}"

    @property
    def ending(self) -> str:
        """What Slurm keeps of the end of a job that did not complete."""
        if self.active or self.state in ("COMPLETED", "CANCELLED"):
            return ""
        code, _, signal = self.facts.get("ExitCode", "").partition(":")
        told = {"exit status": code, "signal": signal}
        words = [f"{name} {number}" for name, number in told.items() if number not in ("", "0")]
        reason = self.facts.get("Reason", "None")
        return ", ".join([*words, *([f"Slurm's reason is {reason}"] if reason != "None" else [])])

    def why_terminated(self, restart: int) -> str:
        """What a start of it that gets SIGTERM may know of the cause; `restart` were before that start."""
        if self.facts.get("Reason") == "TimeLimit":
            return OUT_OF_TIME
        if self.facts.get("PreemptTime", "None")[:1].isdecimal():
            return "pre-empted"
        if self.restarts > restart:  # Slurm has done so before the processes ended
            return "pre-empted, or queued again by hand"
        return "cancelled" if self.state in ("CANCELLED", "COMPLETING") else "told to end, not by Slurm"

    def is_task(self, index: int) -> bool:
        """Whether this is a task of an array, or several that wait, with this one among them."""
        return any(
            int(found[1]) <= index <= int(found[2] or found[1])
            for found in re.finditer(r"(\d+)(?:-(\d+))?", self.facts.get("ArrayTaskId", "").partition("%")[0])
        )


def jobs(number: str, seconds: float = COMMAND_SECONDS) -> list[Job]:
    """The job's records: one, or those of the tasks or components. None when Slurm has forgotten it."""
    told = call(["scontrol", "show", "job", "--oneliner", number], check=False, seconds=seconds)
    if told.returncode != 0:
        if "Invalid job id" in told.stderr or f"Job {number} not found" in told.stdout:  # a task of an array
            return []
        raise SlurmError(f"Slurm does not tell about job {number}: {told.stderr.strip()}")
    return [parsed(line) for line in told.stdout.splitlines() if line.startswith("JobId=")]


def parsed(line: str) -> Job:
    """A record of `scontrol show job --oneliner`: `Name=value` words, of which values may have spaces."""
    words = re.split(r"\s(?=[A-Za-z][A-Za-z0-9/:_]*=)", line.strip())
    return Job(dict(word.split("=", 1) for word in words))


def most_cpus(partition: str | None) -> int:
    """CPUs of the largest node of a partition, or of all that there are; 0 where Slurm does not say."""
    command = ["sinfo", "--noheader", "--exact", "--format=%c"]
    command += [f"--partition={partition}"] * (partition is not None)
    try:
        told = call(command, seconds=QUICK_SECONDS)
    except SlurmError:
        return 0
    return max((int(word) for word in told.stdout.split() if word.isdecimal()), default=0)


def why_terminated(number: str, nodes: Sequence[str], restart: int) -> str:
    """Why a start of a job got SIGTERM, as far as Slurm tells; empty where it does not, as in a container."""
    command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T|%E"]
    try:
        told = call(command, seconds=QUICK_SECONDS)
        found = jobs(number, seconds=QUICK_SECONDS)
    except SlurmError:
        return ""
    if lost := lost_nodes(told.stdout):
        return f"node {', '.join(lost)} is lost"
    return found[0].why_terminated(restart) if found else ""


def lost_nodes(told: str) -> list[str]:
    """Of lines `name|state|reason`, those that Slurm cannot use; a star means that it gets no answer."""
    lost: dict[str, str] = {}
    for name, state, reason in (line.split("|", 2) for line in told.splitlines()):
        if state.endswith("*") or state.startswith(("down", "fail", "unk", "power")):
            lost[name] = f"{name} ({state}: {reason})"
    return list(lost.values())


def call(
    command: Sequence[str],
    *,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    seconds: float = COMMAND_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. Raises `SlurmError` where it is not here, or fails and may not."""
    if shutil.which(command[0]) is None:
        raise SlurmError(
            f"`{command[0]}` is not here: run this on a machine from which jobs are submitted, such as a "
            "login node of the cluster"
        )
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"`{command[0]}` has not answered in {seconds:g} s: Slurm's controller is busy or down"
        ) from None
    if check and told.returncode != 0:
        raise SlurmError(f"`{command[0]}` refuses: {_last_words(told.stderr)}")
    return told


def _last_words(text: str) -> str:
    """Slurm's own, without the name of the command before each line."""
    return "; ".join(re.sub(r"^\w+: (error: )?", "", line) for line in text.strip().splitlines())
