"""TensorBoard files hold the metrics; a missing package is said before the run starts."""

import importlib.util

import pytest

from nemorl.config.run import LoggerConfig
from nemorl.observe.files import TrackerMissing
from nemorl.observe.metrics import StepMetrics
from nemorl.observe.observer import open_trackers
from nemorl.observe.run_folder import RunFolder
from tests.observe.examples import CONFIG
from tests.required import require_module

WANTED = LoggerConfig(tensorboard=True)


def test_none_is_opened_unasked(run_dir):
    assert open_trackers(LoggerConfig(), RunFolder.create(run_dir, CONFIG)) == []


def test_a_missing_package_is_named_with_its_fix(run_dir, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        TrackerMissing, match=r"pip install 'nemorl\[trackers\]', or set logger\.tensorboard=false"
    ):
        open_trackers(WANTED, RunFolder.create(run_dir, CONFIG))


def test_tensorboard_reads_what_was_logged_and_forgets_repeated_steps(run_dir):
    accumulator = require_module("tensorboard.backend.event_processing.event_accumulator")
    folder = RunFolder.create(run_dir, CONFIG)
    (tracker,) = open_trackers(WANTED, folder)
    for step in (1, 2, 3):
        tracker.log(StepMetrics(step, step, {"reward/mean": step / 10}))
    tracker.close()
    folder.close()

    folder = RunFolder.resume(run_dir, CONFIG, step=1)
    (tracker,) = open_trackers(WANTED, folder)
    tracker.log(StepMetrics(2, 2, {"reward/mean": 0.5}))
    tracker.close()

    events = accumulator.EventAccumulator(str(folder.paths.tensorboard))
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("reward/mean")] == [(1, 0.1), (2, 0.5)]
