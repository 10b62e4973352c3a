"""Runs of several engines and rollout workers, and runs that lose a worker and do not restart it."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.run.runs import finish, known_figures, lines, start, worker_pid, write_experiment


@pytest.mark.slow
def test_several_updates_replicas_and_rollout_workers(folder: Path, model: Path) -> None:
    config = write_experiment(
        folder,
        model,
        "several",
        algorithm={
            "num_minibatches": 2,
            "num_steps": 2,
            "advantage": {"name": "remax"},
            "filters": {"drop_equal_rewards": True, "refill": {"max_batches": 3}},
            "oversampling": 1.5,
            "group_seconds": 300,
        },
        rewards=[{"function": "tests.run.rewards:differs"}],
        policy={"layout": {"data_parallel_size": 2}},
        generation={"replicas": 2, "threads": 1, "concurrency": 4, "adaptive_concurrency": True},
        cluster={"rollout_workers": 2},
    )
    status, output = finish(start("train", config))
    assert status == 0, output
    steps = lines(folder / "several")
    assert len(steps) == 2
    # Measured before the first of the two updates: the second one's weights have moved on.
    assert max(s.values["logprob_gap/max"] for s in steps) < 1e-4
    assert any(abs(s.values["ratio/mean"] - 1) > 1e-6 for s in steps)
    for values in (s.values for s in steps):
        assert values["filters/kept"] + values["filters/dropped_equal_rewards"] == values["filters/sampled"]
        assert 4 <= values["filters/sampled"] <= 12
        assert 0 <= values["reward/of_greedy"] <= 1
        # Six groups are sampled at a time, as far as a step may sample more, and four of them trained on.
        assert values["dropped/cut_off"] == min(2, 12 - values["filters/sampled"])
        assert values["dropped/late"] == values["dropped/deadline"] == 0
        assert values["generation/concurrency"] >= 1
    assert {name for s in steps for name in s.values} <= known_figures(folder / "several")


@pytest.mark.slow
@pytest.mark.parametrize(("group", "rank"), [("policy", 1), ("generation", 0), ("rollout", 0)])
def test_a_killed_worker_ends_the_run_with_a_sentence(
    folder: Path, model: Path, group: str, rank: int
) -> None:
    run = f"bereft-of-{group}"
    config = write_experiment(folder, model, run, cluster={"max_model_restarts": 0, "max_worker_restarts": 0})
    driver = start("train", config)
    while len(lines(folder / run)) < 1:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.05)
    os.kill(worker_pid(folder / run / "logs" / f"{group}-{rank}.log"), signal.SIGKILL)
    status, output = finish(driver, seconds=60)
    assert status == 1
    assert output.count(f"{group} rank {rank} died in stage") == 1
    assert f"{group}-{rank}.log" in output
    if newest := sorted((folder / run / "checkpoints").glob("step_" + "[0-9]" * 8)):
        assert f"To continue after step {int(newest[-1].name[5:])}: nemorl train " in output
        assert output.count("--resume") == 1
    else:
        assert "To continue after step" not in output
    assert "Traceback" not in output
