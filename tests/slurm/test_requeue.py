"""A job on a real Slurm that is disturbed; Ray and the run are stubs.

With real ones: test_resume.py, and test_on_cluster_disturbed.py, which compares the metrics.
"""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.selection import in_all
from tests.slurm.jobs import NODE_LOST, Job, Place, command_line, until

ROOT = Path(__file__).parents[2]
PROGRAM = """\
#!/bin/sh
shift 2  # `slurm node`
export STUB={folder} PYTHONPATH={root}
exec {python} -m tests.slurm.stub "$@"
"""


class StubRun:
    """A job whose Ray and run are stubs, controlled by files in a folder."""

    def __init__(self, place: Place, name: str, *words: str, ends: str = "runs") -> None:
        """Submit it with further options; `ends` is what the run does. Wait until the run begins."""
        self.folder = place.folder / f"stub-{name}"
        program = self.folder / "bin" / "nemorl"
        program.parent.mkdir(parents=True)
        program.write_text(PROGRAM.format(folder=self.folder, root=ROOT, python=sys.executable))
        program.chmod(0o755)
        self.will(ends)
        apart = replace(place, programs=self.folder)
        self.job: Job = apart.submit(apart.config(name, ""), "--nodes", "2", *words)
        until((self.folder / "began").exists, f"begin of the run\n{self.job.output}")

    def will(self, what: str) -> None:
        """Set what the next run does."""
        (self.folder / "train").write_text(what)

    def ends_well_after_another_start(self) -> None:
        """Wait for a requeue, and for the end of the job."""
        self.will("ends 0")
        self.job.is_requeued()
        assert self.job.ends() == "COMPLETED", self.job.output
        assert self.job.restarts == 1
        self.job.leaves_nothing()


@pytest.mark.parametrize("partition", ["normal", *in_all("scavenge")])
def test_pre_empted(place, partition):
    """With a grace time, in which it ends and would not come back, and without."""
    run = StubRun(place, f"urgent-{partition}", "--partition", partition)
    place.urgent_job("n2")
    run.ends_well_after_another_start()


def test_status_attach_and_cancel(place):
    run = StubRun(place, "cancel")
    status = place.nemorl("slurm", "status", "runs/cancel")
    assert "RUNNING" in status
    assert run.job.number in status
    command = ("printenv", "SLURM_JOB_ID", "SLURMD_NODENAME")
    attached = place.nemorl("slurm", "attach", "runs/cancel", "--node", "n2", "--", *command)
    assert attached.split() == [run.job.number, "n2"]
    place.nemorl("slurm", "cancel", "runs/cancel")
    assert run.job.state == "CANCELLED"
    assert run.job.restarts == 0
    assert "cancelled with `nemorl slurm cancel`" in place.nemorl("slurm", "status", "runs/cancel")
    run.job.leaves_nothing()


def test_nodes_for_cpus_are_the_second_part_of_a_heterogeneous_job(place):
    run = StubRun(place, "het", "--nodes", "1", "--cpu-nodes", "1", ends="ends 0")
    assert run.job.ends() == "COMPLETED", run.job.output
    reports = run.job.run_dir / "slurm" / f"{run.job.number}.0"
    parts = {node: json.loads((reports / f"{node}.json").read_text())["part"] for node in ("n1", "n2")}
    assert parts == {"n1": "gpu", "n2": "cpu"}


@pytest.mark.slow
def test_a_sweep_runs_its_tasks_concurrently(place):
    """Each on a node of its own, of the same machine; none takes the other's ports."""
    words = ("--nodes", "1", "--sweep", "policy.optimizer.lr=1e-4,2e-4")
    run = StubRun(place, "sweep", *words, ends="ends 0")
    until(lambda: not place.slurm.run("squeue", "--noheader", "--jobs", run.job.number), "end of the sweep")
    tasks = sorted(run.job.run_dir.glob("0*"))
    assert [task.name for task in tasks] == ["00_lr=1e-4", "01_lr=2e-4"]
    ends = [json.loads(next(task.glob("slurm/*/exit.json")).read_text()) for task in tasks]
    assert [end["code"] for end in ends] == [0, 0]
    ports = [json.loads(next(task.glob("slurm/*/plan.json")).read_text())["ports"] for task in tasks]
    assert [list(nodes) for nodes in ports] == [["n1"], ["n2"]]


def test_ray_ends_on_a_node(place):
    run = StubRun(place, "ray-ends")
    process = run.folder / "n2.ray"
    until(lambda: process.exists() and bool(process.read_text()), "start of Ray on n2")
    os.kill(int(process.read_text()), signal.SIGKILL)
    run.ends_well_after_another_start()
    assert "node n2 is lost: Ray ended there" in run.job.output


@pytest.mark.slow
def test_the_daemon_of_a_node_is_killed(place):
    """Slurm sees it after SlurmdTimeout, and queues the job again itself."""
    run = StubRun(place, "daemon")
    place.slurm.kill_daemon("n2")
    try:
        run.will("ends 0")
        run.job.is_requeued()
        until(lambda: "(exit status 143)" in run.job.output, "exit message")
    finally:
        place.slurm.revive()
    run.ends_well_after_another_start()
    assert NODE_LOST.search(run.job.output)


@pytest.mark.slow
def test_the_launcher_on_the_head_is_killed(place):
    run = StubRun(place, "head-killed")
    launchers = [p for p in run.job.processes("n1") if "tests.slurm.stub runs/" in command_line(p)]
    assert len(launchers) == 1
    os.kill(launchers[0], signal.SIGKILL)
    run.ends_well_after_another_start()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "said"), [("runs", "before the time limit"), ("saves", "by SIGTERM (time limit)")]
)
def test_the_time_limit(place, does, said):
    """The run has ended before it, or still saves: then it is cut short in time for another start."""
    run = StubRun(place, f"limit-{does}", "--time", "1", "--sbatch=--signal=USR1@20", ends=does)
    run.ends_well_after_another_start()
    assert f"stopped {said}" in run.job.output
