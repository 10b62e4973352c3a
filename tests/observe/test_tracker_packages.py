"""The packages of trackers read back what a run and its continuation have reported (`make libraries`)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.run import LoggerConfig
from nemorl.observe.metrics import StepMetrics
from nemorl.observe.run_folder import RunFolder
from nemorl.observe.trackers import open_trackers
from tests.observe.examples import CONFIG
from tests.required import require_module

VALUES = {1: 0.25, 2: 0.5, 3: 0.75}


def report(run_dir: Path, caplog: pytest.LogCaptureFixture, **tracker: Any) -> None:
    """Two steps, then a third one by a run that is resumed."""
    config = LoggerConfig(trackers=[tracker])
    for resumed, steps in ((None, (1, 2)), (2, (3,))):
        if resumed is None:
            folder = RunFolder.create(run_dir, CONFIG)
        else:
            folder = RunFolder.resume(run_dir, CONFIG, step=resumed)
        (opened,) = open_trackers(config, folder)
        for number in steps:
            values = {"reward/mean": VALUES[number], "critic/loss": math.nan}
            opened.log(StepMetrics(number, number, values))
        opened.close()
        folder.close()
    log = (run_dir / "logs" / f"tracker-{tracker['name']}.log").read_text()
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [], log


def test_wandb(run_dir, caplog):
    require_module("wandb")
    store = require_module("swanlab.converter.wb.wbdatastore")  # wandb itself reads its files in Go only
    report(run_dir, caplog, name="wandb", mode="offline", project="sums")
    from wandb.proto.wandb_internal_pb2 import Record

    found, runs = {}, set()
    for file in sorted((run_dir / "trackers" / "wandb").glob("offline-run-*/run-*.wandb")):
        with store.WBDataStoreReader() as reader:
            reader.open(file)
            while (data := reader.scan()) is not None:
                record = Record()
                record.ParseFromString(data)
                if record.run.run_id:
                    runs.add((record.run.project, record.run.run_id, record.run.display_name))
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                if "step" in row:
                    found[int(row["step"])] = float(row["reward/mean"])
    assert found == VALUES
    (run,) = runs  # both starts of it
    assert (run[0], run[2]) == ("sums", "run")


def test_mlflow(run_dir, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    require_module("mlflow")
    report(run_dir, caplog, name="mlflow", experiment="sums")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run_dir / "trackers" / "mlflow").resolve().as_uri())
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert {metric.step: metric.value for metric in history} == VALUES
    assert all(math.isnan(m.value) for m in client.get_metric_history(run.info.run_id, "critic/loss"))
    assert run.data.params["algorithm.num_steps"] == "3"
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")


def test_trackio(run_dir, caplog, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(run_dir / "trackers" / "trackio"))  # read when it is imported
    store = require_module("trackio.sqlite_storage").SQLiteStorage
    from trackio import Api

    report(run_dir, caplog, name="trackio", project="sums")
    (run,) = Api().runs("sums")
    rows: list[Mapping[str, Any]] = store.get_logs("sums", run.name)
    assert {row["step"]: row["reward/mean"] for row in rows} == VALUES
    assert run.config["algorithm"]["num_steps"] == 3


def test_swanlab(run_dir, caplog):
    require_module("swanlab")
    report(run_dir, caplog, name="swanlab", mode="offline", project="sums")
    store = require_module("swanlab.sdk.internal.core_python.store")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found, runs = {}, set()
    for file in sorted((run_dir / "trackers" / "swanlab").glob("run-*/run-*.swanlab")):
        reader = store.DataStoreReader()
        reader.open(str(file))
        for data in reader:
            record = Record.FromString(data)
            if record.start.id:
                runs.add((record.start.project, record.start.name, record.start.id))
            if record.scalar.key == "reward/mean":
                found[record.scalar.step] = record.scalar.value.number
        reader.close()
    assert found == VALUES
    (run,) = runs  # both starts of it
    assert run[:2] == ("sums", "run")
