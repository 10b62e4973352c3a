"""Validations that overlap with the next steps of an asynchronous run."""

import json
import signal
import time
from pathlib import Path

import pytest

from nemorl.config.facts import metric_names
from nemorl.config.load import load_experiment
from tests.run.runs import finish, lines, start, tiny_model, write_experiment

METRICS = ("validation/accuracy", "validation/reward", "validation/length")


@pytest.mark.slow
def test_a_validation_is_of_the_version_of_its_step_and_survives_a_kill(tmp_path: Path) -> None:
    """`nemorl eval` measures the exported weights of a step with the same tasks and seeds."""
    path = write_experiment(
        tmp_path,
        tiny_model(tmp_path / "model"),
        "overlapping",
        policy={"layout": {}},
        algorithm={"max_staleness": 1, "validation": {"period": 1, "num_generations_per_prompt": 4}},
        checkpointing={"period": 1, "keep": 9, "export_hf": True, "metric": "validation/reward"},
    )
    run = path.with_suffix("")
    driver = start("train", path)
    while len(lines(run)) < 2:
        assert driver.poll() is None
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    status, output = finish(start("train", path, "--resume"))
    assert status == 0, output

    steps = lines(run)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    experiment = load_experiment(path)
    known = metric_names(experiment.algorithm, experiment.env, experiment.rewards)
    assert {name for step in steps for name in step.values} <= known
    manifests = [json.loads(file.read_text()) for file in sorted(run.glob("checkpoints/*/manifest.json"))]
    for manifest, step in zip(manifests, steps, strict=True):
        assert {name: manifest["metrics"][name] for name in METRICS} == {n: step.values[n] for n in METRICS}

    exported = run / "checkpoints" / "step_00000003" / "hf"
    status, output = finish(start("eval", path, f"policy.model_path={exported}"))
    assert status == 0, output
    measured = json.loads((run / "eval" / "metrics.json").read_text())["metrics"]
    assert {name: measured[name] for name in METRICS} == pytest.approx(
        {name: steps[2].values[name] for name in METRICS}
    )
