"""Runs on a real Slurm of two nodes: the same metrics as on one machine, and an orderly end.

Runs that are disturbed are in test_on_cluster_disturbed.py.
"""

import os
import re
import sys
from dataclasses import replace

import pytest

from tests.slurm.jobs import metrics

APART = """\
cluster:
  labels:
    policy: {nemorl.io/node: n1}
    generation: {nemorl.io/node: n2}
    rollout: {nemorl.io/node: n2}
"""
LONG = "algorithm: {num_steps: 2000}"


def test_policy_on_one_node_and_generation_on_the_other_as_on_one_machine(place, local_run):
    job = place.submit(place.config("apart", APART), "--nodes", "2")
    assert job.starts("policy", 2) == ["n1", "n1"]
    assert job.starts("generation", 1) == ["n2"]
    assert job.ends() == "COMPLETED", job.output
    assert metrics(job.run_dir) == local_run("")
    job.leaves_nothing()


@pytest.mark.slow
def test_a_running_job_has_a_status_a_shell_and_is_cancelled(place):
    config = place.config("cancelled", LONG)
    job = place.submit(config, "--nodes", "2")
    job.reaches_step(2)
    status = place.nemorl("slurm", "status", config.name)
    assert job.number in status
    assert "RUNNING" in status
    attached = place.nemorl(
        "slurm", "attach", config.name, "--", "printenv", "SLURM_JOB_ID", "SLURMD_NODENAME"
    )
    assert attached.split() == [job.number, "n1"]
    assert re.search(r"step \d+/2000", place.nemorl("slurm", "logs", config.name))
    place.nemorl("slurm", "cancel", config.name)
    assert job.ends() == "CANCELLED"
    assert "cancelled with `nemorl slurm cancel`" in place.nemorl("slurm", "status", config.name)
    job.leaves_nothing()
    saved = max(int(path.name.removeprefix("step_")) for path in (job.run_dir / "checkpoints").glob("step_*"))
    assert saved == job.step  # the last complete step, though it is no multiple of the period
    assert job.restarts == 0


@pytest.mark.slow
def test_an_experiment_that_does_not_fit_is_refused_before_ray_starts(place):
    """Five processes of one CPU each on a node of four, which `submit` does not know."""
    labels = "{rollout: {nemorl.io/node: n1}}"
    config = place.config("too-large", f"cluster: {{rollout_workers: 5, labels: {labels}}}")
    job = place.submit(config, "--nodes", "2")
    assert job.ends() == "FAILED"
    assert job.facts()["ExitCode"] == "2:0"
    assert "cluster.rollout_workers" in job.output
    problem = "nodes with nemorl.io/node=n1 have room for 4 rollout processes"
    assert problem in " ".join(job.output.split())
    assert "Ray runs at" not in job.output
    assert not list(job.run_dir.glob("slurm/*/ray_token"))
    assert not (job.run_dir / "metrics.jsonl").exists()


# The program that a job starts: on n2 with an empty folder where the others see the run folders.
NOT_SHARED = """\
#!/bin/sh
if [ "$SLURMD_NODENAME" = n2 ] && [ -z "$HIDDEN" ]; then
    HIDDEN=1 exec unshare --mount sh -c 'mount -t tmpfs none {runs} && exec "$0" "$@"' "$0" "$@"
fi
exec {python} -c '
import sys
from nemorl.cli import main
from nemorl.slurm.start import Rendezvous
Rendezvous.wait_for_nodes.__defaults__ = (10.0,)  # seconds, of 300
sys.exit(main())' "$@"
"""


@pytest.mark.skipif(os.getuid() != 0, reason="hiding a folder from a node needs root")
def test_a_node_that_does_not_see_the_run_folder_is_named(place):
    program = place.folder / "not-shared" / "bin" / "nemorl"
    program.parent.mkdir(parents=True)
    program.write_text(NOT_SHARED.format(runs=place.folder / "runs", python=sys.executable))
    program.chmod(0o755)
    apart = replace(place, programs=program.parents[1])
    job = apart.submit(apart.config("not-shared", ""), "--nodes", "2")
    assert job.ends() == "FAILED"
    assert "n2 did not appear in runs/not-shared/slurm/" in job.output
    assert "a file system that all nodes share" in " ".join(job.output.split())
    assert "Ray runs at" not in job.output
