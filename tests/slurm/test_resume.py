"""A run with real processes on a real Slurm that loses a node: requeued and resumed, in the shortest way."""

import os
import signal

from nemorl.observe.metrics import read_metrics
from tests.slurm.jobs import command_line

# One policy process on the node that is lost, and nothing that samples.
SFT = """\
defaults: sft.yaml
run_dir: runs/resumed
policy:
  model_path: model
  layout: {tensor_parallel_size: 1}
data: {train: {size: 500}, validation: null}
rewards: []
algorithm: {num_steps: 150, batch_size: 4, validation: {at_end: false}}
checkpointing: {period: 10, save_hf: false}
cluster: {policy_threads: 1, labels: {policy: {nemorl.io/node: n2}}}
"""


def test_a_lost_node_is_named_and_the_run_resumes(place):
    config = place.folder / "resumed.yaml"
    config.write_text(SFT)
    job = place.submit(config, "--nodes", "2")
    job.reaches_step(10)

    (launcher,) = [p for p in job.processes("n2") if "nemorl slurm node" in command_line(p)]
    os.kill(launcher, signal.SIGKILL)

    job.is_requeued()
    assert job.ends() == "COMPLETED", job.output
    assert job.restarts == 1
    assert "node n2 is lost: its launcher ended or the node is down" in job.output
    record = job.start_record(1)
    assert record.step_before >= 10  # the checkpoint that it resumed from
    assert [line.step for line in read_metrics(job.run_dir / "metrics.jsonl")] == list(range(1, 151))
    job.leaves_nothing()
