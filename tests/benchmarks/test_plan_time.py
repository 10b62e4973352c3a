"""Runs next to their plan: made from known constants, and a real process's peak."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from nemorl.plan.calibration import Calibration, read_run
from nemorl.plan.memory import policy_memory
from tests.plan.models import write_model
from tests.plan.test_calibration import CPU, START, write_run
from tests.scripts import load_script


def test_runs_are_predicted_by_constants_of_others(tmp_path: Path) -> None:
    benchmark = load_script("benchmarks/plan_time.py", "bench_plan_time")
    model = write_model(tmp_path / "model")
    changes = {
        "few prompts": (),
        "small batches": ("tokens: 512=tokens: 64",),
        "no checkpoint": ("algorithm:=checkpointing: {enabled: false}\nalgorithm:",),
        "many prompts": ("num_prompts_per_step: 4=num_prompts_per_step: 16",),
        "predicted": ("num_prompts_per_step: 4=num_prompts_per_step: 8",),
    }
    cases = {name: benchmark.Case((), is_fitted=name != "predicted") for name in changes}
    runs = {name: read_run(write_run(tmp_path / name, model, *of)) for name, of in changes.items()}
    planned = policy_memory(runs["few prompts"].experiment, runs["few prompts"].shape)

    found = benchmark.compare(cases, runs, dict.fromkeys(cases, planned.total), Calibration(CPU, START))

    assert found["largest_error_of_predicted_stages"] < 0.2
    memory = {name: run["memory"] for name, run in found["runs"].items()}
    assert memory["few prompts"]["error"] == 0
    without = replace(planned, checkpoint=0).total
    assert memory["no checkpoint"]["planned_bytes"] == without
    assert memory["no checkpoint"]["error"] == pytest.approx(without / planned.total - 1)
    for row in memory.values():
        assert row["planned_bytes"] == sum(row["parts"].values())
    rows = list(benchmark.table_rows(found["runs"]))
    assert [row["of"] for row in rows if row["run"] == "few prompts"][-1] == "memory, GB"


def test_the_peak_is_that_of_the_process() -> None:
    meter = load_script("benchmarks/meter.py", "bench_meter")
    held = np.ones(2**25)  # 256 MiB
    del held
    assert meter.resident_peak(os.getpid()) > psutil.Process().memory_info().rss + 2**27
