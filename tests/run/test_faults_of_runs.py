"""Whole asynchronous runs in which processes die and hang."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from nemorl.observe.metrics import StepMetrics
from tests.run.runs import finish, lines, start, tiny_model, write_experiment


def processes(run: Path, name: str) -> list[int]:
    """Those that have written a log, in order."""
    log = run / f"logs/{name}.log"
    return [int(number) for number in re.findall(r"process (\d+)", log.read_text())]


def wait(driver: "subprocess.Popen[str]", run: Path, met: Callable[[list[StepMetrics]], bool]) -> None:
    end = time.monotonic() + 300
    while not met(lines(run)):
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < end, "the run has stopped making steps"
        time.sleep(0.05)


def last(steps: list[StepMetrics], name: str) -> float:
    return steps[-1].values[name] if steps else 0.0


@pytest.mark.slow
def test_an_asynchronous_run_outlives_its_only_engine_and_its_rollout_workers(tmp_path: Path) -> None:
    config = write_experiment(
        tmp_path, tiny_model(tmp_path / "model"), "faults", policy={"layout": {}},
        algorithm={"num_steps": 2000, "max_staleness": 2, "validation": {}},
        data={"validation": None, "train": {"name": "arithmetic", "digits": 3, "size": 20000}},
        cluster={"rollout_workers": 2, "deadlines": {"health": 2, "generation": 120}},
        checkpointing={"period": 10000}, logger={"console": "plain", "samples_per_step": 16},
    )  # fmt: skip
    run = tmp_path / "faults"
    driver = start("train", config)

    def strike(name: str, number: int, metric: str, times: int) -> None:
        """Signal a process, and wait until it has returned and steps were made after it."""
        os.kill(processes(run, name)[-1], number)
        wait(driver, run, lambda steps: last(steps, metric) == times)
        count = len(lines(run))
        wait(driver, run, lambda steps: len(steps) >= count + 3)

    try:
        wait(driver, run, lambda steps: len(steps) >= 3)
        strike("generation-0", signal.SIGKILL, "generation/replicas_restarted", 1)
        strike("rollout-1", signal.SIGKILL, "rollout/workers_restarted", 1)
        strike("generation-0", signal.SIGSTOP, "generation/replicas_restarted", 2)
        strike("rollout-0", signal.SIGSTOP, "rollout/workers_restarted", 2)
        driver.send_signal(signal.SIGTERM)
        status, output = finish(driver)
    finally:
        driver.kill()
    assert "Stopped by SIGTERM after step" in output, (status, output[-2000:])
    steps = lines(run)
    assert [s.step for s in steps] == list(range(1, len(steps) + 1))
    # Tokens of the newest weights are what the policy says, up to rounding, whichever process sampled them.
    gaps = [s.values["staleness/gap_0"] for s in steps if "staleness/gap_0" in s.values]
    assert max(gaps) < 1e-4
    assert max(s.values["version/lag_max"] for s in steps) <= 2
    assert sum(s.values["dropped/lost"] for s in steps) > 0
    assert sum(s.values["errors"] for s in steps) == 0
    # No task was lost or doubled: a group of four of each that was handed out.
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    counts = Counter(sample["task"] for sample in samples)
    assert set(counts.values()) == {4}
    assert len(counts) == 4 * len(steps)
