"""The runs of a sweep: what runs at the same time, with stand-ins for runs; and ends, signals and resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nemorl.errors import UsageError
from nemorl.observe.sweep import Outcome, State, read_states
from nemorl.plan.machine import Gpu, Machine
from nemorl.run.sweep import Needs, PlannedRun, Resources, Share, SweepDriver, ended, to_continue
from tests.run.runs import finish, lines, start, tiny_model, write_experiment

GB = 10**9


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def machine(cores: int = 8, gigabytes: int = 64, gpus: int = 0) -> Machine:
    return Machine(cores, gigabytes * GB, None, tuple(Gpu("a GPU", 80 * GB) for _ in range(gpus)))


def test_cores_are_shared_among_the_runs_that_fit() -> None:
    needs = [Needs(3, GB)] * 4
    resources = Resources(machine(cores=8), needs)
    assert resources.most == 2
    first, second = resources.take(needs[0]), resources.take(needs[1])
    assert first is not None
    assert second is not None
    assert (len(first.cores), len(second.cores)) == (4, 4)
    assert not first.cores & second.cores
    assert resources.take(needs[2]) is None
    resources.give_back(first)
    third = resources.take(needs[2])
    assert third is not None
    assert third.cores == first.cores


def test_memory_bounds_the_runs_and_leaves_them_all_cores() -> None:
    needs = [Needs(1, 40 * GB)] * 3
    resources = Resources(machine(cores=8, gigabytes=64), needs)
    share = resources.take(needs[0])
    assert share is not None
    assert len(share.cores) == 8
    assert resources.take(needs[1]) is None


def test_gpus_are_given_by_name() -> None:
    needs = [Needs(4, GB, gpus=2)] * 3
    resources = Resources(machine(cores=64, gpus=5), needs, gpus=["2", "3", "4", "6", "7"])
    shares = [resources.take(need) for need in needs]
    assert [share and share.gpus for share in shares] == [("2", "3"), ("4", "6"), None]


def test_runs_that_listen_on_one_port_take_turns() -> None:
    needs = [Needs(1, GB, ports=frozenset({9400}))] * 2
    resources = Resources(machine(), needs)
    share = resources.take(needs[0])
    assert share is not None
    assert resources.take(needs[1]) is None
    resources.give_back(share)
    assert resources.take(needs[1]) is not None


def test_a_run_larger_than_the_machine_starts_alone() -> None:
    needs = [Needs(16, GB), Needs(1, GB)]
    resources = Resources(machine(cores=2), needs)
    assert resources.take(needs[0]) is not None
    assert resources.take(needs[1]) is None


def test_oversubscription_is_by_request_and_keeps_memory() -> None:
    needs = [Needs(4, 20 * GB)] * 5
    resources = Resources(machine(cores=2), needs, max_concurrent=5, oversubscribe=True)
    shares = [resources.take(need) for need in needs]
    assert [share is not None for share in shares] == [True, True, True, False, False]


@dataclass
class FakeProcess:
    """A run that takes some polls of the driver and then ends with a status, or at a signal with 75."""

    polls: int
    status: int
    stubborn: bool = False  # ends at the second signal only
    signals: list[int] = field(default_factory=list)

    def poll(self) -> int | None:
        if len(self.signals) > self.stubborn:
            return 75 if not self.stubborn else 1
        self.polls -= 1
        return self.status if self.polls < 0 else None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def planned(folder: Path, count: int, processes: int = 1) -> list[PlannedRun]:
    names = [f"{index:02d}" for index in range(count)]
    return [PlannedRun(n, folder / f"{n}.yaml", folder / n, Needs(processes, GB), 5) for n in names]


def test_runs_start_in_order_and_a_failed_one_ends_nothing(tmp_path: Path) -> None:
    runs, concurrent, started = planned(tmp_path, 5), [], []
    durations = [(3, 0), (1, 1), (1, 0), (1, -9), (1, 75)]

    def begin(run: PlannedRun, share: Share) -> FakeProcess:
        started.append(run.name)
        return FakeProcess(*durations[int(run.name)])

    driver = SweepDriver(tmp_path, runs, Resources(machine(cores=2), [r.needs for r in runs]), begin, 0.0)
    driver.run(lambda run: None, lambda: concurrent.append(sum(run.process is not None for run in runs)))
    assert started == ["00", "01", "02", "03", "04"]
    assert max(concurrent) == 2
    assert [run.outcome.state.value for run in runs] == [
        "complete",
        "failed",
        "complete",
        "failed",
        "stopped",
    ]
    assert runs[1].outcome.reason == "exit status 1: no output"
    assert runs[3].outcome.reason == "killed by SIGKILL"
    assert read_states(tmp_path) == {run.name: run.outcome for run in runs}


def test_a_signal_stops_the_running_and_starts_no_others(tmp_path: Path) -> None:
    runs, processes = planned(tmp_path, 3), []

    def begin(run: PlannedRun, share: Share) -> FakeProcess:
        processes.append(FakeProcess(10**6, 0, stubborn=run.name == "01"))
        return processes[-1]

    def interrupt() -> None:
        if len(driver.signals) < 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    driver = SweepDriver(tmp_path, runs, Resources(machine(cores=2), [r.needs for r in runs]), begin, 0.0)
    driver.run(lambda run: None, interrupt)
    assert [run.outcome.state.value for run in runs] == ["stopped", "failed", "waiting"]
    assert [process.signals for process in processes] == [[signal.SIGTERM], [signal.SIGTERM] * 2]
    assert signal.getsignal(signal.SIGINT) is before


def test_only_complete_runs_are_kept_by_a_resume(tmp_path: Path) -> None:
    def folder(name: str, **end: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "header.json").write_text(
            json.dumps([{"started": "", **({"end": end} if end else {})}])
        )
        return tmp_path / name

    complete = folder("complete", outcome="complete", error="")
    assert to_continue(complete, None).state == State.COMPLETE
    # As a driver that was killed recorded it.
    assert to_continue(complete, Outcome(State.RUNNING)).state == State.COMPLETE
    failed = folder("failed", outcome="failed", error="\nno room\nmore")
    for run_dir in (failed, folder("killed"), tmp_path / "absent"):
        assert to_continue(run_dir, None).state == State.WAITING
    assert ended(failed, 1) == Outcome(State.FAILED, "no room")


def test_a_shared_cluster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    with pytest.raises(UsageError, match="RAY_ADDRESS is set"):
        SweepDriver(tmp_path, [], Resources(machine(), [Needs(1, 1)]))


# A run that takes its time to save after SIGTERM; it holds its folder as `nemorl train` does.
RUN = """#!{python}
import fcntl, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[4]).with_suffix("")
lock = (folder / ".lock").open("a+")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
lock.truncate(0)
lock.write(f"{{os.getpid()}} on here\\n")
lock.flush()
log = folder / "events"
event = lambda text: log.open("a").write(text + "\\n")
def stop(*_):
    time.sleep(1)
    event("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
again = log.exists()
event("start")
time.sleep(0.2 if again else 60)
event("end")
"""

DRIVE = """
import sys
from pathlib import Path
from tests.run.test_sweep import machine, planned
from nemorl.run.sweep import Resources, SweepDriver
sys.executable, folder = sys.argv[1:]
runs = planned(Path(folder), 2)
resources = Resources(machine(cores=2), [r.needs for r in runs])
driver = SweepDriver(Path(folder), runs, resources, poll_seconds=0.05)
driver.run(lambda run: print(run.name, run.outcome.state, flush=True), lambda: None)
"""


@pytest.mark.ci
def test_a_killed_driver_starts_nothing_twice(tmp_path: Path) -> None:
    script = tmp_path / "run"
    script.write_text(RUN.format(python=sys.executable), encoding="utf-8")
    script.chmod(0o755)
    words = [sys.executable, "-c", DRIVE, str(script), str(tmp_path)]
    first = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("0*/events"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    first.kill()
    first.communicate()
    subprocess.run(words, timeout=60, check=True)
    for name in ("00", "01"):
        events = (tmp_path / name / "events").read_text(encoding="utf-8").split()
        assert events == ["start", "saved", "start", "end"]


@pytest.mark.slow
def test_a_sweep_is_stopped_and_continued(tmp_path: Path) -> None:
    """Two runs: the first is stopped within its steps, the second has not begun."""
    config = write_experiment(
        tmp_path,
        tiny_model(tmp_path / "model"),
        "run",
        policy={"layout": {}},
        algorithm={"num_steps": 4, "validation": {}},
        checkpointing={"period": 1},
    )
    words = (
        "sweep",
        config,
        "policy.optimizer.lr=1e-3,1e-2",
        "--max-concurrent",
        "1",
        "--metric",
        "reward/mean",
    )
    sweep, folder = start(*words), tmp_path / "run"
    deadline = time.monotonic() + 120
    while not lines(folder / "00_lr=1e-3") and time.monotonic() < deadline:
        time.sleep(0.1)
    sweep.send_signal(signal.SIGTERM)
    status, said = finish(sweep)
    assert status == 75, said
    assert f"Continue with: nemorl sweep {folder} --resume" in said
    stopped = lines(folder / "00_lr=1e-3")[-1].step
    assert 1 <= stopped < 4
    assert not (folder / "01_lr=1e-2").exists()
    refused = finish(start(*words))
    assert refused[0] == 2
    assert "holds a sweep. Continue it with --resume" in refused[1]

    status, said = finish(start("sweep", folder, "--resume"))
    assert status == 0, said
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["metric"] == "reward/mean"
    assert {p["status"] for p in results["points"]} == {"complete"}
    assert [p["best"] for p in results["points"]] == sorted(
        (p["best"] for p in results["points"]), reverse=True
    )
    for name in ("00_lr=1e-3", "01_lr=1e-2"):
        assert [line.step for line in lines(folder / name)] == [1, 2, 3, 4]
    header = json.loads((folder / "00_lr=1e-3" / "header.json").read_text(encoding="utf-8"))
    assert [entry["resumed_step"] for entry in header] == [None, stopped]
