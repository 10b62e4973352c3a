"""Trackers get all metrics, and whatever happens to one costs a warning."""

import importlib.util
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nemorl.config.run import LoggerConfig
from nemorl.observe.files import TrackerMissing
from nemorl.observe.metrics import StepMetrics
from nemorl.observe.run_folder import RunFolder
from nemorl.observe.trackers import TrackerProcess, open_trackers
from tests.observe.examples import CONFIG
from tests.required import require_module

TENSORBOARD = LoggerConfig(trackers=["tensorboard"])
WANDB = LoggerConfig(trackers=["wandb"])
# A stand-in for the package wandb: what its functions do is what a test requires to go wrong.
PACKAGE = """
    import pathlib, signal, os, sys, time
    class Run:
        def define_metric(self, *names, **options): ...
        def log(self, values):
            {log}
        def finish(self):
            {finish}
    def Settings(**options): ...
    def init(dir, **options):
        {init}
        return Run()
"""


def step(number: int, **values: float) -> StepMetrics:
    return StepMetrics(number, number, {"reward/mean": number / 10} | values)


def scalars(run_dir: Path, name: str = "reward/mean") -> list[tuple[int, float]]:
    accumulator = require_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run_dir / "trackers" / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 6)) for event in events.Scalars(name)]


def test_none_is_opened_unasked(run_dir):
    assert open_trackers(LoggerConfig(), RunFolder.create(run_dir, CONFIG)) == []


def test_a_missing_package_is_named_with_its_fix(run_dir, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        TrackerMissing, match=r"pip install 'nemorl\[trackers\]', or remove it from logger\.trackers"
    ):
        open_trackers(TENSORBOARD, RunFolder.create(run_dir, CONFIG))


def test_tensorboard_reads_what_was_logged_and_forgets_repeated_steps(run_dir):
    folder = RunFolder.create(run_dir, CONFIG)
    (tracker,) = open_trackers(TENSORBOARD, folder)
    for number in (1, 2, 3):
        tracker.log(step(number, loss=math.nan))
    tracker.rewind(2)
    tracker.log(step(3, loss=2.0))
    tracker.close()
    folder.close()
    assert scalars(run_dir) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert [math.isnan(value) for _, value in scalars(run_dir, "loss")] == [True, True, False]

    folder = RunFolder.resume(run_dir, CONFIG, step=1)
    (tracker,) = open_trackers(TENSORBOARD, folder)
    tracker.log(step(2, **{"reward/mean": 0.5}))
    tracker.close()
    assert scalars(run_dir) == [(1, 0.1), (2, 0.5)]


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Make the stand-in, with the statements of its functions."""

    def made(*, init: str = "pass", log: str = "pass", finish: str = "pass") -> None:
        package = tmp_path / "packages"
        package.mkdir()
        text = textwrap.dedent(PACKAGE).format(init=init, log=log, finish=finish)
        (package / "wandb.py").write_text(text, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.syspath_prepend(str(package))

    return made


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        ({"init": "raise ConnectionError('no route to host')"}, "ConnectionError: no route to host"),
        ({"log": "raise ValueError('refused')"}, "ValueError: refused"),
        ({"finish": "raise OSError('disk full')"}, "OSError: disk full"),
        ({"log": "sys.exit('the key is wrong')"}, "the key is wrong"),
        ({"log": "os.kill(os.getpid(), signal.SIGKILL)"}, "exit status -9"),
        ({"init": "time.sleep(1000)"}, "it was not done 1 s after the end of the run"),
        ({"log": "time.sleep(1000)"}, "it was not done 1 s after the end of the run"),
        ({"finish": "time.sleep(1000)"}, "it was not done 1 s after the end of the run"),
    ],
)
def test_what_goes_wrong_costs_one_warning(run_dir, wandb, caplog, statements, reason):
    wandb(**statements)
    limit = 1.0 if "not done" in reason else 60.0
    tracker = TrackerProcess(WANDB.trackers[0], RunFolder.create(run_dir, CONFIG), close_seconds=limit)
    began = time.monotonic()
    for number in range(1, 4):
        tracker.log(step(number))
    assert time.monotonic() - began < 0.5
    tracker.close()
    tracker.log(step(4))
    tracker.close()

    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"The tracker wandb has failed: {reason}")
    assert "metrics.jsonl has all metrics" in warning


def test_a_tracker_that_reads_nothing_neither_blocks_nor_takes_all_memory(run_dir, wandb, caplog):
    wandb(init="time.sleep(1000)")
    tracker = TrackerProcess(WANDB.trackers[0], RunFolder.create(run_dir, CONFIG), close_seconds=0.5)
    large = {f"metric/{number}": 1.0 for number in range(200)}
    for number in range(11_000):
        tracker.log(StepMetrics(number, 0, large))
    tracker.close()
    (warning,) = warnings_of(caplog)
    assert "10000 messages wait for it" in warning


def test_a_killed_run_leaves_a_complete_record(run_dir):
    require_module("tensorboard")
    script = f"""
        import os, signal
        from nemorl.observe.run_folder import RunFolder
        from nemorl.observe.trackers import open_trackers
        from tests.observe.test_trackers import CONFIG, TENSORBOARD, Path, step
        (tracker,) = open_trackers(TENSORBOARD, RunFolder.create(Path({str(run_dir)!r}), CONFIG))
        for number in range(1, 4):
            tracker.log(step(number))
        while tracker._messages.qsize():
            pass
        print(tracker._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    deadline = time.monotonic() + 60
    while Path(f"/proc/{int(ended.stdout)}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert scalars(run_dir)[:2] == [(1, 0.1), (2, 0.2)]


def test_an_interrupt_is_for_the_run(run_dir, tmp_path, wandb):
    wandb(finish=f"pathlib.Path({str(tmp_path / 'finished')!r}).touch()")
    folder = RunFolder.create(run_dir, CONFIG)
    tracker = TrackerProcess(WANDB.trackers[0], folder)
    assert os.getpgid(tracker._process.pid) != os.getpgid(0)
    tracker.close()
    assert tracker._process.returncode == 0
    assert (tmp_path / "finished").exists()
