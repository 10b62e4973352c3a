"""The Slurm of the tests itself: it comes, it goes, and leaves nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, ClusterError, SlurmCluster, start_keeper
from tests.slurm.configuration import environment
from tests.slurm.jobs import until
from tests.slurm.keeper import descendants


def script(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.slurm.cluster", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


def named(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def test_two_clusters_at_once_end_with_their_jobs_and_leave_nothing(slurm):
    before = set(descendants(os.getpid()))
    with SlurmCluster() as other:
        assert other.folder != slurm.folder
        for cluster in (slurm, other):
            ran = cluster.run("srun", "--nodes=2", "printenv", "SLURMD_NODENAME")
            assert sorted(ran.split()) == ["n1", "n2"]
        # A job that ignores SIGTERM and left its session goes too.
        other.run("sbatch", "--output=/dev/null", "--wrap", "trap '' TERM; setsid sleep 1000 & sleep 1000")
        started = {p for p in descendants(os.getpid()) if p not in before}
        assert {"munged", "slurmctld", "slurmd"} <= {named(process) for process in started}
    assert set(descendants(os.getpid())) <= before
    assert not other.folder.exists()


def test_it_goes_with_a_test_that_is_killed(slurm):
    words = (
        "from tests.slurm.cluster import *\nwith SlurmCluster() as c: print(c.folder, flush=True); input()"
    )
    test = subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert test.stdout is not None
    folder = Path(test.stdout.readline().strip())
    assert folder.exists()
    started = descendants(test.pid)
    test.kill()
    test.communicate()
    until(lambda: not any(named(process) for process in started), "end of all its processes", 30)
    assert not folder.exists()


def test_by_hand(slurm):
    folder = slurm.folder / "by-hand"
    started = script("start", folder, "--cpus", "3", "--gpus", "2")
    assert started.stdout == f"export SLURM_CONF={folder}/slurm.conf\n", started.stderr
    try:
        assert script("start", folder).stderr.startswith(f"A cluster runs in {folder} already")
        ran = subprocess.run(
            [
                "srun",
                "--exclusive",
                "--gpus-per-node=2",
                "printenv",
                "SLURM_CPUS_ON_NODE",
                "SLURM_GPUS_ON_NODE",
            ],
            env=environment(folder),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.stdout.split() == ["3", "2"], ran.stderr
    finally:
        assert script("stop", folder).returncode == 0
    assert script("stop", folder).stderr == f"No cluster runs in {folder}\n"


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("tests.slurm.configuration._found", lambda name: None if name == "munged" else name)
    with pytest.raises(ClusterError, match="Not installed: munged"), SlurmCluster():
        pass


def test_a_path_too_long_for_sockets_is_refused(slurm, tmp_path):
    with pytest.raises(ClusterError, match="longer than"):
        start_keeper(tmp_path / ("x" * 60), cpus=1, gpus=0, stdin=subprocess.DEVNULL)
