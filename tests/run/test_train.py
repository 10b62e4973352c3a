"""Whole runs through the command line: real Ray, Megatron over gloo, the weight exchange, the engine."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.run.runs import (
    assert_same_run,
    finish,
    known_figures,
    lines,
    start,
    worker_pid,
    write_experiment,
)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, model: Path) -> Path:
    """The folder of a run that nothing disturbed."""
    status, output = finish(start("train", write_experiment(folder, model, "uninterrupted")))
    assert status == 0, output
    return folder / "uninterrupted"


def test_a_run_leaves_its_story(uninterrupted: Path) -> None:
    steps = lines(uninterrupted)
    assert [s.step for s in steps] == [1, 2, 3, 4, 5, 6]
    expected = {
        "reward/mean", "reward/std", "loss/policy", "kl/reference", "entropy", "grad_norm",
        "logprob_gap/mean", "logprob_gap/max", "tokens/generated", "tokens/trained",
        "time/generation", "time/environment", "time/logprobs", "time/training", "time/refit", "time/step",
        "throughput/tokens_per_second",
    }  # fmt: skip
    assert all(expected <= set(s.values) for s in steps)
    assert [s.step for s in steps if "validation/pass@1" in s.values] == [3, 6]
    assert {name for s in steps for name in s.values} <= known_figures(uninterrupted)
    assert {p.name for p in uninterrupted.iterdir()} >= {
        "config.yaml", "metrics.jsonl", "samples.jsonl", "timeline.json", "report.html", "header.json",
        "logs",
    }  # fmt: skip
    assert sorted(p.name for p in (uninterrupted / "checkpoints").iterdir()) == [
        "step_00000004",
        "step_00000006",
    ]


def test_time_is_attributed_to_processes(uninterrupted: Path) -> None:
    for step in lines(uninterrupted):
        values = step.values
        critical = {name: share for name, share in values.items() if name.startswith("critical/")}
        assert sum(critical.values()) == pytest.approx(1, abs=1e-9)
        assert all(0 < values[f"idle/{kind}"] < 1 for kind in ("policy", "rollout", "generation"))
        assert 0 < critical["critical/policy"] <= 1 - values["idle/policy"] + 1e-9
        # The policy does nothing while the driver waits for samples; engines also receive weights.
        sampling = (values["time/generation"] + values["time/environment"]) / values["time/step"]
        assert values["idle/policy"] >= sampling - 1e-9
        assert critical["critical/environment"] <= sampling
    events = json.loads((uninterrupted / "timeline.json").read_text())
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"critical path", "processes: policy", "processes: rollout", "processes: generation"} <= tracks


def test_a_finished_run_is_not_started_again(uninterrupted: Path) -> None:
    before = (uninterrupted / "metrics.jsonl").read_bytes(), (uninterrupted / "header.json").read_bytes()
    (uninterrupted / "report.html").unlink()
    status, output = finish(start("train", uninterrupted.with_suffix(".yaml"), "--resume"))
    assert status == 0, output
    assert "is already complete (checkpoint at step 6); nothing to do." in output
    assert "raise algorithm.num_steps (now 6)" in output
    assert "start: done" not in output
    after = (uninterrupted / "metrics.jsonl").read_bytes(), (uninterrupted / "header.json").read_bytes()
    assert after == before
    assert (uninterrupted / "report.html").exists()  # which may have lacked room


def test_engine_and_trainer_agree_at_every_step(uninterrupted: Path) -> None:
    assert max(s.values["logprob_gap/max"] for s in lines(uninterrupted)) < 1e-4


def test_the_policy_moves_away_from_its_reference(uninterrupted: Path) -> None:
    steps = lines(uninterrupted)
    assert steps[0].values["kl/reference"] == 0
    assert steps[-1].values["kl/reference"] > 0


def test_a_killed_driver_resumes_to_the_run_that_would_have_been(
    folder: Path, model: Path, uninterrupted: Path
) -> None:
    # The device is left while it generates, which must not be seen in the metrics either.
    away = {"weights": True, "optimizer": True}
    config = write_experiment(folder, model, "killed", policy={"offload": away})
    driver = start("train", config)
    while len(lines(folder / "killed")) < 3:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.05)
    workers = [psutil.Process(worker_pid(log)) for log in (folder / "killed" / "logs").glob("*-[0-9].log")]
    os.kill(driver.pid, signal.SIGKILL)  # in the middle of step 4, one step beyond the checkpoint of step 2
    driver.communicate()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive, "workers of a killed driver live on"

    status, output = finish(start("train", config, "--resume"))
    assert status == 0, output
    resumed = lines(folder / "killed")
    assert [s.step for s in resumed] == [1, 2, 3, 4, 5, 6]
    assert_same_run(resumed, lines(uninterrupted))


@pytest.mark.slow
def test_a_truncated_checkpoint_is_named_and_the_one_before_is_used(
    folder: Path, model: Path, uninterrupted: Path
) -> None:
    newest = uninterrupted / "checkpoints" / "step_00000006"
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    before = lines(uninterrupted)
    status, output = finish(start("train", folder / "uninterrupted.yaml", "--resume"))
    assert status == 0, output
    assert victim.name in output
    assert "4 of 6 done" in output
    assert_same_run(lines(uninterrupted), before)


def test_a_run_is_not_written_over(folder: Path, uninterrupted: Path) -> None:
    status, output = finish(start("train", folder / "uninterrupted.yaml"))
    assert status == 2
    assert "--resume" in output


def test_a_run_that_is_asked_to_stop_keeps_its_last_step_and_continues_as_if_nothing_had_been(
    folder: Path, model: Path, uninterrupted: Path
) -> None:
    config = write_experiment(folder, model, "stopped", checkpointing={"period": 100})
    driver = start("train", config)
    while len(lines(folder / "stopped")) < 3:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.05)
    driver.send_signal(signal.SIGTERM)  # step 4 samples
    status, output = finish(driver, seconds=60)
    assert status == 75, output
    done = len(lines(folder / "stopped"))
    assert f"Stopped by SIGTERM after step {done}. Continue with --resume." in output
    assert "SIGTERM received at" not in output  # the trace of Ray's handler, which aborts after 3 seconds
    assert "Traceback" not in output
    assert [p.name for p in (folder / "stopped" / "checkpoints").iterdir()] == [f"step_{done:08}"]

    status, output = finish(start("train", config, "--resume"))
    assert status == 0, output
    assert f"{done} of 6 done" in output
    assert_same_run(lines(folder / "stopped"), lines(uninterrupted))
