"""Runs whose engines join and leave by `nemorl scale`."""

import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.run.runs import finish, lines, start, tiny_model, write_experiment


def scale(run: Path, number: int) -> list[str]:
    status, output = finish(start("scale", run, "--replicas", number, "--wait", 240))
    assert status == 0, output
    return output.splitlines()


def wait_for_steps(driver: "subprocess.Popen[str]", run: Path, count: int) -> None:
    """That many more."""
    end, goal = time.monotonic() + 300, len(lines(run)) + count
    while len(lines(run)) < goal:
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < end, "the run makes no steps"
        time.sleep(0.05)


@pytest.mark.slow
def test_engines_join_and_leave_an_asynchronous_run(tmp_path: Path) -> None:
    config = write_experiment(
        tmp_path, tiny_model(tmp_path / "model"), "scaled", policy={"layout": {}},
        algorithm={"num_steps": 5000, "max_staleness": 2, "validation": {}},
        generation={"concurrency": 8, "on_update": "restart"},
        data={"validation": None, "train": {"name": "arithmetic", "digits": 3, "size": 20000}},
        cluster={"deadlines": {"generation": 120}},
        checkpointing={"period": 10000}, logger={"console": "plain", "samples_per_step": 16},
    )  # fmt: skip
    run = tmp_path / "scaled"
    driver = start("train", config)
    try:
        wait_for_steps(driver, run, 3)
        joined = scale(run, 2)
        wait_for_steps(driver, run, 5)
        left = scale(run, 1)
        wait_for_steps(driver, run, 5)
        driver.send_signal(signal.SIGTERM)
        status, output = finish(driver)
    finally:
        driver.kill()
    assert "Stopped by SIGTERM after step" in output, (status, output[-2000:])
    assert joined[-1] == "generation replica 1: up"
    assert left == ["generation replica 1: left"]
    assert not list(run.glob("*.json.tmp"))
    assert not (run / "replicas.json").exists()
    steps = lines(run)
    counts = [
        tuple(int(s.values[f"generation/replicas{name}"]) for name in ("", "_joined", "_left", "_lost"))
        for s in steps
    ]
    leaving = (1, 1, 0, 0)  # in a step that ends while the requests of the engine that leaves are moved
    assert [c for c in dict.fromkeys(counts) if c != leaving] == [(1, 0, 0, 0), (2, 1, 0, 0), (1, 1, 1, 0)]
    # Tokens of the newest weights have the policy's logprobs, up to rounding, whichever engine sampled them.
    gaps = [s.values["staleness/gap_0"] for s in steps if "staleness/gap_0" in s.values]
    assert max(gaps) < 1e-4
    assert sum(s.values["errors"] for s in steps) == 0
    # No task was lost or doubled: a group of four of each.
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    tasks = Counter(sample["task"] for sample in samples)
    assert (set(tasks.values()), len(tasks)) == ({4}, 4 * len(steps))
