"""The recovery times that are read from a run's log, and a run under faults."""

import json
import signal
import subprocess
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.faults import TARGETS, Fault, draw_faults, read_times, recovery_times
from nemorl.config.sandbox import LocalSandboxConfig
from nemorl.environments.sandbox import SandboxUnavailable, find_isolation
from tests.required import missing

PAUSE = 3.0, 8.0
ENGINE, ROLLOUT, POLICY, REWARD, _, SERVER = TARGETS


def test_the_seed_decides_times_processes_and_signals() -> None:
    faults = draw_faults(600, PAUSE, seed=1)
    assert faults == draw_faults(600, PAUSE, seed=1)
    assert faults != draw_faults(600, PAUSE, seed=2)
    assert {(f.target.kind, f.rank, f.signal) for f in faults} == {
        (target.kind, rank, number)
        for target in TARGETS
        for rank in range(target.processes)
        for number in (signal.SIGKILL, signal.SIGSTOP)
    }
    pauses = [later.due - earlier.due for earlier, later in pairwise(faults)]
    assert PAUSE[0] <= min(pauses) <= max(pauses) <= PAUSE[1]
    assert faults[-1].due < 600


def test_each_loss_is_of_the_fault_before_it(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    log.write_text(
        "2026-01-01 00:00:12,500 WARNING nemorl.session.supervisor: generation replica 1 is lost: it hangs\n"
        "2026-01-01 00:00:20,000 WARNING nemorl.run.recovery: policy lost in step 7, restarting: it died\n"
        "2026-01-01 00:00:21,000 INFO nemorl.rollout: of something else\n"
        "  | a line below it\n"
        "2026-01-01 00:00:24,000 WARNING nemorl.session.supervisor: generation replica 1 restarted and "
        "back in rotation\n"
        "2026-01-01 00:00:29,000 WARNING nemorl.run.recovery: policy restarted in 9 s, continuing after "
        "step 4: 2 completed steps are discarded (5 to 6)\n"
        "2026-01-01 00:00:34,000 WARNING nemorl.session.handles: reward_1 lost, restarting: it died\n"
        "2026-01-01 00:00:38,000 WARNING nemorl.session.handles: reward_1 restarted in 4.0 s\n"
        "2026-01-01 00:00:40,000 WARNING nemorl.session.supervisor: rollout worker 0 is lost: no answer\n"
    )
    server = "WARNING nemorl.rewards.scored: reward `digits` at http://127.0.0.1:4711/v1"
    (tmp_path / "rollout-0.log").write_text(
        f"2026-01-01 00:00:52,000 {server} does not answer; calls wait for it\n"
        f"2026-01-01 00:00:56,000 {server} answers again, after 4.0 s\n"
    )
    (tmp_path / "rollout-1.log").write_text(
        f"2026-01-01 00:00:51,000 {server} does not answer; calls wait for it\n"
    )
    begin = datetime(2026, 1, 1).timestamp()
    faults = [
        Fault(0, ENGINE, 1, signal.SIGSTOP, begin + 10),
        Fault(0, ENGINE, 1, signal.SIGKILL, begin + 15),  # while it starts
        Fault(0, POLICY, 0, signal.SIGKILL, begin + 19),
        Fault(0, REWARD, 0, signal.SIGKILL, begin + 33),
        Fault(0, ROLLOUT, 1, signal.SIGKILL, None),  # it was not there
        Fault(0, ROLLOUT, 0, signal.SIGKILL, begin + 50),  # not the reason for its loss
        Fault(0, SERVER, 0, signal.SIGKILL, begin + 50),
    ]
    assert read_times(faults, tmp_path) == 1
    rows = {row["fault"]: row for row in recovery_times(faults)}
    engine = rows["engine, SIGSTOP"]
    assert (engine["detected_seconds"], engine["back_seconds"]) == ([2.5], [14.0])
    assert (rows["engine, SIGKILL"]["faults"], rows["engine, SIGKILL"]["measured"]) == (1, 0)
    policy = rows["policy rank, SIGKILL"]
    assert (policy["detected_seconds"], policy["back_seconds"], policy["steps_discarded"]) == (
        [1.0],
        [10.0],
        [2],
    )
    reward = rows["reward model, SIGKILL"]
    assert (reward["detected_seconds"], reward["back_seconds"]) == ([1.0], [5.0])
    of_server = rows["reward server, SIGKILL"]
    assert (of_server["detected_seconds"], of_server["back_seconds"]) == ([1.0], [6.0])
    assert rows["rollout worker, SIGKILL"]["faults"] == 1
    assert rows["rollout worker, SIGKILL"]["measured"] == 0


@pytest.mark.slow
def test_a_run_outlives_two_minutes_of_faults(tmp_path: Path) -> None:
    """The script checks the run, and fails with what it finds.

    It has a /dev/shm of its own, where what processes of other tests leave is not found.
    """
    try:
        find_isolation(LocalSandboxConfig(name="bubblewrap"))
    except SandboxUnavailable as error:
        missing("bubblewrap", str(error))
    script = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
    alone = ["bwrap", "--dev-bind", "/", "/", "--tmpfs", "/dev/shm"]
    ended = subprocess.run(
        [*alone, sys.executable, str(script), "--seconds", "120"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    result = json.loads((tmp_path / "runs" / "bench" / "chaos.json").read_text())
    assert result["problems"] == []
    assert sum(row["measured"] for row in result["recovery"]) > 0
