"""Speeds of the plan of time in the simulator, whose schedule the plan has formulas of."""

from pathlib import Path

import pytest

from nemorl.config.load import load_experiment
from nemorl.plan.generation_time import default_lengths
from nemorl.plan.hardware import HARDWARE
from nemorl.plan.step_time import RunPlan
from nemorl.simulate.simulation import predict
from nemorl.simulate.workload import planned_workload
from tests.config.experiments import write
from tests.plan.published import shape_of

FIELDS = (
    "policy.precision=bfloat16",
    "policy.max_sequence_length=4096",
    "policy.micro_batch_tokens=8192",
    "policy.layout={data_parallel_size: 16, expert_parallel_size: 8}",
    "generation={backend: vllm, tensor_parallel_size: 2, replicas: 8, max_num_seqs: 256}",
    "generation.max_new_tokens=3840",
    "cluster={num_nodes: 4, gpus_per_node: 8}",
    "algorithm.num_prompts_per_step=64",
    "algorithm.num_generations_per_prompt=32",
    "algorithm.num_minibatches=4",
)


def plan(folder: Path, staleness: int) -> RunPlan:
    experiment = load_experiment(write(folder), [*FIELDS, f"algorithm.max_staleness={staleness}"])
    return RunPlan(experiment, shape_of("Qwen3-30B-A3B"), HARDWARE["h100"], default_lengths(experiment))


def test_speeds_are_those_of_the_plan(tmp_path: Path) -> None:
    planned = plan(tmp_path, 0)
    workload = planned_workload(planned)
    for batch in (64, 256):
        step = planned.engine.decode_step(batch, planned.lengths.context).seconds
        assert workload.step_seconds(batch) == pytest.approx(step)
    # Cut at 3,840, as the simulator does, 960 tokens on average.
    assert workload.turn_tokens.mean > 960
    stage = planned.step().stages["training"].seconds
    assert 2048 * planned.lengths.sequence * workload.training == pytest.approx(stage)
    assert workload.refit == planned.refit_cost.seconds


@pytest.mark.parametrize(("staleness", "tolerance"), [(0, 0.12), (1, 0.15), (4, 0.25)])
def test_the_plan_next_to_the_simulated_schedule(tmp_path: Path, staleness: int, tolerance: float) -> None:
    planned = plan(tmp_path, staleness)
    simulated = predict(planned.experiment, planned_workload(planned), seed=0, num_steps=3)
    assert planned.step().seconds == pytest.approx(simulated.step_seconds, rel=tolerance)
