"""A run with a stopped policy rank: the report, the error and what `nemorl doctor` says, before and after."""

import os
import signal
import time
from pathlib import Path

import pytest

from nemorl.session.stalls import StallReport
from tests.run.runs import finish, lines, start, tiny_model, worker_pid, write_experiment


@pytest.mark.slow
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    # Long enough for the first steps on a busy machine; what waits for the stopped rank waits for all of it.
    deadlines = {"stall": 2.0} | dict.fromkeys(("logprobs", "training", "refit", "checkpoint"), 10.0)
    algorithm = {"num_steps": 1000, "validation": {"period": None}}
    cluster = {"deadlines": deadlines, "max_model_restarts": 0}  # the fault ends the run
    changes = {"cluster": cluster, "algorithm": algorithm}
    driver = start("train", write_experiment(tmp_path, tiny_model(tmp_path / "model"), "run", **changes))
    run = tmp_path / "run"
    while len(lines(run)) < 2:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.05)
    pid = worker_pid(run / "logs" / "policy-1.log")
    os.kill(pid, signal.SIGSTOP)
    while not (reports := list(run.glob("stall-*.json"))):
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.05)
    cause = f"policy rank 1 (process {pid}) is stopped (state T"

    status, said = finish(start("doctor", run))
    assert status == 1, said
    assert f"{run}: running, without progress" in said
    assert f"probable cause: policy-1, process {pid}, is stopped (state T" in said
    assert f"kill -CONT {pid}" in said

    status, output = finish(driver, seconds=120)
    assert status == 1, output
    assert f"Probable cause: {cause}" in output
    assert "Stall report: " in output
    report = StallReport.read(reports[0])
    assert not report.ended
    assert report.cause().startswith(cause)
    by_name = {(process.group, process.rank): process for process in report.processes}
    assert by_name.keys() >= {("policy", 0), ("policy", 1), ("generation", 0), ("rollout", 0)}
    waiting, engine, rollout = (
        by_name[key].activity for key in (("policy", 0), ("generation", 0), ("rollout", 0))
    )
    assert waiting is not None
    assert waiting.finished
    assert any("main_loop" in line for stack in waiting.stacks.values() for line in stack)
    assert engine is not None
    assert engine.queues.keys() == {"running", "waiting", "seconds_since_step"}
    assert rollout is not None
    assert "groups" in rollout.queues
    assert report.queues["collector"].keys() == {"running", "ready", "worker 0"}
    ended = [one for path in run.glob("stall-*.json") if (one := StallReport.read(path)).ended]
    assert ended  # of the call, and of the check which ranks still respond
    assert all(one.cause().startswith(cause) for one in ended)

    status, said = finish(start("doctor", run))
    assert status == 1, said
    assert f"{run}: failed" in said
    assert f"probable cause: {cause}" in said
    assert "--resume" in said
