"""Runs that are pre-empted, reach their time limit or lose a node: they resume and learn the same."""

import pytest

from tests.slurm.jobs import NODE_LOST, metrics, until

pytestmark = pytest.mark.slow

# Long enough to be disturbed in the middle, and for Slurm to see it.
LONGER = "algorithm: {num_steps: 24, num_prompts_per_step: 32}"
LONGEST = "algorithm: {num_steps: 150, num_prompts_per_step: 32}"
SPREAD = "cluster: {placement: SPREAD}"
HETEROGENEOUS = "cluster: {labels: {policy: {nemorl.io/part: gpu}, rollout: {nemorl.io/part: cpu}}}"


def test_a_policy_over_both_nodes_as_on_one_machine(place, local_run):
    job = place.submit(place.config("spread", SPREAD), "--nodes", "2")
    assert sorted(job.starts("policy", 2)) == ["n1", "n2"]
    assert job.ends() == "COMPLETED", job.output
    assert metrics(job.run_dir) == local_run("")


def test_rollout_workers_on_nodes_for_cpus(place, local_run):
    """A heterogeneous job."""
    config = place.config("het", HETEROGENEOUS)
    job = place.submit(config, "--nodes", "1", "--cpu-nodes", "1")
    assert job.starts("policy", 2) == ["n1", "n1"]
    assert job.starts("rollout", 1) == ["n2"]
    assert job.ends() == "COMPLETED", job.output
    assert metrics(job.run_dir) == local_run("")


def test_a_sweep_runs_its_tasks_concurrently(place, local_run):
    """Each on a node of its own; they share the machine and its ports."""
    job = place.submit(place.config("sweep", ""), "--nodes", "1", "--sweep", "policy.optimizer.lr=5e-5,1e-3")
    until(lambda: not place.slurm.run("squeue", "--noheader", "--jobs", job.number), "end of the sweep")
    found = {run_dir.name: metrics(run_dir) for run_dir in sorted(job.run_dir.glob("0*"))}
    assert list(found) == ["00_lr=5e-5", "01_lr=1e-3"]
    assert found["00_lr=5e-5"] == local_run("")
    assert found["01_lr=1e-3"] == local_run("policy: {optimizer: {lr: 1e-3}}")


@pytest.mark.parametrize("partition", ["normal", "scavenge"])
def test_pre_empted_it_is_requeued_and_learns_the_same(place, local_run, partition):
    """With a grace time, in which it ends, and without."""
    config = place.config(f"pre-empted-{partition}", LONGER)
    job = place.submit(config, "--nodes", "2", "--partition", partition)
    job.reaches_step(5)
    place.urgent_job("n2")
    job.is_requeued()
    assert job.ends() == "COMPLETED", job.output
    assert job.restarts == 1
    assert metrics(job.run_dir) == local_run(LONGER)


def test_the_daemon_of_a_node_is_killed(place, local_run):
    """Slurm considers the node lost; the run resumes when it is back."""
    job = place.submit(place.config("daemon-killed", LONGEST), "--nodes", "2")
    job.reaches_step(5)
    place.slurm.kill_daemon("n2")
    try:
        job.is_requeued()
        until(lambda: "(exit status 143)" in job.output, "exit message")
    finally:
        place.slurm.revive()
    assert job.ends() == "COMPLETED", job.output
    assert NODE_LOST.search(job.output), job.output
    assert metrics(job.run_dir) == local_run(LONGEST)


def test_ray_dies_on_a_node(place, local_run):
    job = place.submit(place.config("ray-killed", LONGER), "--nodes", "2")
    job.reaches_step(5)
    job.kill_ray("n2")
    job.is_requeued()
    assert job.ends() == "COMPLETED", job.output
    assert "node n2 is lost: Ray ended there" in job.output
    assert metrics(job.run_dir) == local_run(LONGER)


def test_before_the_time_limit_it_saves_and_the_next_start_resumes(place, local_run):
    job = place.submit(place.config("out-of-time", LONGEST), "--nodes", "2", "--sbatch=--signal=USR1@120")
    job.reaches_step(5)
    job.may_run(job.minutes + 2)
    job.is_requeued()
    job.may_run(60)
    assert job.ends() == "COMPLETED", job.output
    assert "stopped before the time limit" in job.output
    assert metrics(job.run_dir) == local_run(LONGEST)
