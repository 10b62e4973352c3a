"""metrics.jsonl: strict JSON on disk, the same values when read back."""

import json
import math
import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from nemorl.observe.files import JsonLinesWriter
from nemorl.observe.metrics import StepMetrics, read_metrics


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_metrics_come_back_as_they_were(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [
        StepMetrics(0, 0, {"validation/reward": 0.25}),
        StepMetrics(1, 1, {"reward/mean": 1 / 3, "lr": 1e-6}),
    ]
    with closing(JsonLinesWriter(path)) as writer:
        for step in steps:
            writer.append(step.to_json())
    assert read_metrics(path) == steps
    assert json.loads(path.read_text().splitlines()[1]) == {
        "step": 1,
        "version": 1,
        "reward/mean": 1 / 3,
        "lr": 1e-6,
    }


def test_nan_and_infinity_are_null_and_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(JsonLinesWriter(path)) as writer:
        step = StepMetrics(1, 0, {"loss/policy": math.nan, "grad_norm": math.inf, "entropy": 2.0})
        writer.append(step.to_json())
    line = json.loads(path.read_text(), parse_constant=refuse_constant)
    assert line["loss/policy"] is None
    assert line["nonfinite"] == {"loss/policy": "nan", "grad_norm": "inf"}

    values = read_metrics(path)[0].values
    assert math.isnan(values["loss/policy"])
    assert values["grad_norm"] == math.inf
    assert values["entropy"] == 2.0


def test_a_metric_cannot_hide_the_step():
    with pytest.raises(ValueError, match=r"metrics of step 4: \['version'\]"):
        StepMetrics(4, 4, {"version": 1.0})


def test_a_killed_writer_leaves_a_file_that_reads(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from pathlib import Path\n"
        "from nemorl.observe.files import JsonLinesWriter; from nemorl.observe.metrics import StepMetrics\n"
        "writer = JsonLinesWriter(Path(sys.argv[1])); step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    writer.append(StepMetrics(step, step, {f'metric/{i}': i / 7 for i in range(200)}).to_json())\n"
        "    if step == 20: print('going', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()

    steps = read_metrics(path)
    assert len(steps) >= 20
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert all(len(step.values) == 200 for step in steps)
