"""A run on the Slurm of the tests: submitted as a person does, watched, disturbed, and read."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nemorl.observe.metrics import read_metrics
from nemorl.slurm.start import ExitRecord, newest_step
from tests.clocks import without_clocks
from tests.slurm.cluster import SlurmCluster
from tests.slurm.keeper import descendants

POLL_SECONDS = 0.25
TIMEOUT_SECONDS = 400.0  # of a busy machine; nothing here waits for as long when all is well
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY"}
# What a job says at its end of a node that Slurm has lost.
NODE_LOST = re.compile(r"stopped by SIGTERM \(node n2 \(down\*?: .*\) is lost\).*\(exit status 143\)")

# Step, version and metrics by name, of each line of metrics.jsonl.
Metrics = list[tuple[int, int, dict[str, float]]]


def until(reached: Callable[[], bool], what: str, seconds: float = TIMEOUT_SECONDS) -> None:
    """Wait; an AssertionError that says for what where it is in vain."""
    assert within(seconds, reached), f"not in {seconds:.0f} s: {what}"


def within(seconds: float, reached: Callable[[], bool]) -> bool:
    """Wait for `reached()`, at most so long; whether it was."""
    deadline = time.monotonic() + seconds
    while not (done := reached()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return done


def metrics(run_dir: Path) -> Metrics:
    """Those of a run, without clocks."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    return [(line.step, line.version, without_clocks(line.values)) for line in lines]


@dataclass(frozen=True)
class Place:
    """A folder that all nodes share, with a model and configs in it, and the Slurm to run them on."""

    slurm: SlurmCluster
    folder: Path
    programs: Path = Path(sys.executable).parents[1]  # the environment that jobs run in

    def nemorl(self, *words: str) -> str:
        """What `nemorl WORDS` says in the folder; it must end well."""
        answer = subprocess.run(
            [sys.executable, "-m", "nemorl.cli", *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert answer.returncode == 0, f"{words}: {answer.returncode}\n{answer.stdout}{answer.stderr}"
        return answer.stdout

    @property
    def environment(self) -> dict[str, str]:
        """For commands and jobs."""
        return self.slurm.environment | {"NEMORL_ENV": str(self.programs)}

    def config(self, name: str, text: str) -> Path:
        """A config of the tests' run with some more in it; its run folder has its name."""
        path = self.folder / f"{name}.yaml"
        path.write_text(f"defaults: shortened.yaml\nrun_dir: runs/{name}\n{text}\n")
        return path

    def submit(self, config: Path, *words: str) -> "Job":
        """`nemorl slurm submit`, for an hour at most."""
        answer = self.nemorl("slurm", "submit", config.name, "--time", "60", *words)
        found = re.search(r"\bjob (\d+)", answer)
        assert found is not None, answer
        return Job(self, found[1], self.folder / "runs" / config.stem)

    def urgent_job(self, node: str) -> None:
        """Submit a short job that pre-empts the others on a node."""
        words = ("--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null")
        self.slurm.run("sbatch", *words, "--wrap", "true")


@dataclass(frozen=True)
class Job:
    """A job, by its number, and the folder of its run."""

    place: Place
    number: str
    run_dir: Path

    def facts(self) -> dict[str, str]:
        """What `scontrol show job` says."""
        answer = self.place.slurm.run("scontrol", "--oneliner", "show", "job", self.number)
        return dict(word.partition("=")[::2] for word in answer.splitlines()[0].split())

    @property
    def state(self) -> str:
        """RUNNING, PENDING, COMPLETED, …"""
        return self.facts()["JobState"]

    @property
    def restarts(self) -> int:
        """How often it was queued again."""
        return int(self.facts()["Restarts"])

    @property
    def output(self) -> str:
        """What the job printed, of all its starts."""
        path = Path(self.facts()["StdOut"])
        return path.read_text() if path.exists() else "(it has not begun)"

    @property
    def step(self) -> int:
        """The last step whose metrics are written; 0 before the first."""
        path = self.run_dir / "metrics.jsonl"
        return max((line.step for line in read_metrics(path)), default=0) if path.exists() else 0

    def start_record(self, restart: int) -> ExitRecord:
        """How one of its starts ended."""
        record = ExitRecord.read(self.run_dir / "slurm" / f"{self.number}.{restart}")
        assert record is not None, self.output
        return record

    def reaches_step(self, step: int) -> None:
        """Wait until its metrics are written; the job must not end before."""
        self._wait_for(lambda: self.step >= step, f"step {step}")

    def reaches_checkpoint(self, step: int) -> None:
        """Wait until a checkpoint of this step or a later one is complete: training does not wait for it."""
        self._wait_for(lambda: newest_step(self.run_dir) >= step, f"checkpoint of step {step}")

    def starts(self, group: str, count: int) -> list[str]:
        """Wait for the processes of a group of workers: the nodes they run on, by rank."""
        self._wait_for(lambda: len(self._nodes_of(group)) == count, f"start of {group}")
        return self._nodes_of(group)

    @property
    def minutes(self) -> int:
        """Complete minutes that it has run."""
        hours, minutes, _ = self.facts()["RunTime"].split(":")
        return 60 * int(hours) + int(minutes)

    def may_run(self, minutes: int) -> None:
        """Change its time limit."""
        self.place.slurm.run("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")

    def is_requeued(self, count: int = 1) -> None:
        """Wait for its next start in the queue."""
        self._wait_for(lambda: self.restarts >= count, f"restart {count}")

    def ends(self) -> str:
        """Wait for its end; its state."""
        assert within(TIMEOUT_SECONDS, lambda: self.state in ENDED), f"{self.state}\n{self.output}"
        return self.state

    def processes(self, node: str | None = None) -> list[int]:
        """Of the job, on one node or on both, Slurm's own left out."""
        found = []
        for process in descendants(self.place.slurm.keeper):
            environment = environment_of(process)
            ours = environment.get("SLURM_JOB_ID") == self.number
            if ours and node in (None, environment.get("SLURMD_NODENAME")):
                found.append(process)
        return found

    def leaves_nothing(self) -> None:
        """Wait for the end of all its processes."""
        within(60, lambda: not self.processes())
        assert [command_line(process) for process in self.processes()] == []

    def _nodes_of(self, group: str) -> list[str]:
        logs = sorted((self.run_dir / "logs").glob(f"{group}-*.log"))
        started = [re.findall(r"process (\d+) on", log.read_text())[-1:] for log in logs]
        return [environment_of(int(found[0])).get("SLURMD_NODENAME", "") for found in started if found]

    def kill_ray(self, node: str) -> None:
        """SIGKILL to the raylet of a node."""
        raylets = [p for p in self.processes(node) if _comm(p) == "raylet"]
        assert len(raylets) == 1
        os.kill(raylets[0], signal.SIGKILL)

    def _wait_for(self, reached: Callable[[], bool], what: str) -> None:
        within(TIMEOUT_SECONDS, lambda: reached() or self.state in ENDED)
        assert reached(), f"job {self.number} is {self.state} before {what}\n{self.output}"


def environment_of(process: int) -> dict[str, str]:
    """What a process was started with; empty where it is gone."""
    with suppress(OSError):
        words = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(word.partition("=")[::2] for word in words if "=" in word)
    return {}


def command_line(process: int) -> str:
    """As it was started; empty where it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    return ""


def _comm(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""
