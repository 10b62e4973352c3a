"""A run with real processes on a real Slurm that loses its node: requeued and resumed."""

import pytest

from nemorl.observe.metrics import read_metrics

# One policy process, and nothing that samples.
SFT = """\
defaults: sft.yaml
run_dir: runs/resumed
policy:
  model_path: model
  layout: {tensor_parallel_size: 1}
data: {train: {size: 500}, validation: null}
rewards: []
algorithm: {num_steps: 60, batch_size: 4, validation: {at_end: false}}
checkpointing: {period: 5, save_hf: false}
cluster: {policy_threads: 1}
"""


@pytest.mark.ci
def test_a_lost_node_is_named_and_the_run_resumes(place):
    config = place.folder / "resumed.yaml"
    config.write_text(SFT)
    job = place.submit(config, "--nodes", "1")
    job.reaches_checkpoint(5)
    (node,) = set(job.starts("policy", 1))

    job.kill_ray(node)

    job.is_requeued()
    assert job.ends() == "COMPLETED", job.output
    assert job.restarts == 1
    assert f"node {node} is lost: Ray ended there" in job.output
    assert job.start_record(1).step_before >= 5  # the checkpoint that it resumed from
    assert [line.step for line in read_metrics(job.run_dir / "metrics.jsonl")] == list(range(1, 61))
    job.leaves_nothing()
