"""The search of placements and layouts, against plans of single runs and an enumeration."""

from dataclasses import replace
from pathlib import Path

import pytest

from nemorl.config.load import load_experiment
from nemorl.plan.hardware import HARDWARE
from nemorl.plan.layouts import list_layouts
from nemorl.plan.memory import policy_memory
from nemorl.plan.step_time import RunPlan, UnplannedRun
from nemorl.plan.suggest import Suggestion, suggest
from nemorl.plan.training_time import Lengths
from tests.config.experiments import write
from tests.plan.conftest import Configure
from tests.plan.published import shape_of

FIELDS = (
    "policy.precision=bfloat16",
    "policy.max_sequence_length=4096",
    "policy.micro_batch_tokens=4096",
    "policy.recompute={name: auto}",
    "generation={backend: vllm, max_num_seqs: 256, max_new_tokens: 3840}",
    "cluster={num_nodes: 2, gpus_per_node: 8}",
    "algorithm.num_prompts_per_step=32",
    "algorithm.num_generations_per_prompt=16",
)
LENGTHS = Lengths(prompt=256, response=900, limit=3840, sigma=1.0)
SHAPE, H100 = shape_of("Llama-3.1-8B"), HARDWARE["h100"]


def found(folder: Path, num_devices: int = 16, staleness: tuple[int, ...] = (0, 1)) -> list[Suggestion]:
    return suggest(load_experiment(write(folder), FIELDS), SHAPE, H100, LENGTHS, num_devices, staleness)


def test_suggestions_fit_use_all_devices_and_are_in_order(tmp_path: Path) -> None:
    suggestions = found(tmp_path)
    assert len(suggestions) > 4
    seconds = [one.step.seconds for one in suggestions]
    assert seconds == sorted(seconds)
    for one in suggestions:
        assert one.plan.devices == 16
        assert policy_memory(one.plan.experiment, SHAPE).on_device == one.memory <= 0.9 * H100.memory_bytes
        assert one.plan.engine.cached_tokens >= 8 * LENGTHS.sequence
        assert one.reason.startswith(f"{one.step.longest} is ")
    plans = [one.plan.experiment for one in suggestions]
    ways = {(plan.generation.shares_devices, plan.algorithm.allows_staleness) for plan in plans}
    assert ways == {(True, False), (True, True), (False, False), (False, True)}


def test_the_printed_fields_give_the_suggested_step(tmp_path: Path) -> None:
    for one in found(tmp_path)[:4]:
        experiment = load_experiment(write(tmp_path), [*FIELDS, *one.overrides])
        policy = experiment.policy.model_copy(update={"recompute": one.plan.experiment.policy.recompute})
        experiment = experiment.model_copy(update={"policy": policy})
        planned = RunPlan(experiment, SHAPE, H100, LENGTHS).step()
        assert planned.seconds == pytest.approx(one.step.seconds)


def test_no_other_layout_of_the_same_split_is_faster(tmp_path: Path) -> None:
    (best,) = [
        one for one in found(tmp_path, staleness=(0,)) if one.plan.experiment.generation.shares_devices
    ]
    experiment = best.plan.experiment
    sizes = [c for c in list_layouts(experiment, SHAPE, 16, H100.usable_bytes) if c.fits]
    for choice in (c for c in sizes if c.layout.context_parallel_size == 1):
        if choice.layout.tensor_parallel_size > 8 or choice.layout.virtual_pipeline_parallel_size > 4:
            continue
        policy = experiment.policy.model_copy(update={"layout": choice.layout})
        other = replace(best.plan, experiment=experiment.model_copy(update={"policy": policy}))
        assert other.step().seconds >= best.step.seconds * (1 - 1e-9)


def test_runs_that_cannot_be_searched(tmp_path: Path, configure: Configure) -> None:
    with pytest.raises(UnplannedRun, match=r"generation\.backend = torch: .* choose one whose engines have"):
        suggest(configure("policy.precision=bfloat16"), SHAPE, H100, LENGTHS, 8, (0,))
    small = replace(H100, memory_bytes=10**9)
    assert suggest(load_experiment(write(tmp_path), FIELDS), SHAPE, small, LENGTHS, 8, (0,)) == []
