"""The process of one tracker: reads messages of the run from standard input and calls the tracker's package.

The first line names tracker and run, later lines are steps: `{"step": 3, "values": {...}}`, with NaN and
infinities as strings, or `{"rewind": 2}`. The end of the input completes the record. A run that is resumed
continues the record of its earlier starts, whose id is kept in a file next to it.
"""

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from nemorl.config.yaml import leaves

_METRICS_AT_ONCE = 1000  # that MLflow takes
_PARAMETERS_AT_ONCE, _LONGEST_PARAMETER = 100, 500


class Record(Protocol):
    """A tracker's record of a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """Steps after this one come again."""

    def close(self) -> None:
        """Complete it."""


class Run:
    """The run that a record is of."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        self.name, self.resumed_step = str(start["run"]), start["resumed_step"]
        self.tracker: Mapping[str, Any] = start["tracker"]
        self.folder = Path(start["folder"])
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config: dict[str, Any] = yaml.safe_load(Path(start["config"]).read_text(encoding="utf-8")) or {}
        self._id = self.folder / f"{self.tracker['name']}.id"

    @property
    def id(self) -> str | None:
        """What the tracker knows the run by; None at the first start."""
        return self._id.read_text(encoding="ascii").strip() if self._id.exists() else None

    @id.setter
    def id(self, value: str) -> None:
        self._id.write_text(f"{value}\n", encoding="ascii")

    def own_id(self) -> str:
        """An id for trackers that let their users choose it."""
        if self.id is None:
            self.id = uuid.uuid4().hex[:16]
        assert self.id is not None
        return self.id


class TensorBoardRecord:
    """Event files; steps that come again hide those before."""

    def __init__(self, run: Run) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        if run.resumed_step is not None:
            self.rewind(run.resumed_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        found = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=self._summary.Summary(value=found))
        self._writer.flush()

    def rewind(self, step: int) -> None:
        started = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(step=step + 1, session_log=started)

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), **fields))


class WandbRecord:
    """A run of Weights & Biases. Its own steps only grow, so ours is a metric that others are drawn over."""

    def __init__(self, run: Run) -> None:
        import wandb

        given = {key: run.tracker[key] for key in ("project", "entity", "group", "tags", "mode")}
        self._run = wandb.init(
            **given,
            id=run.own_id(),
            name=run.name,
            dir=str(run.folder),
            config=run.config,
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def rewind(self, step: int) -> None:
        """Values of a step that comes again stay next to the new ones."""

    def close(self) -> None:
        self._run.finish()


class MlflowRecord:
    """A run of MLflow, with the configuration as parameters."""

    def __init__(self, run: Run) -> None:
        # A store of files is in maintenance only, and the other one requires a database's packages.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri = run.tracker["tracking_uri"] or (run.folder / "mlflow").resolve().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        if (known := run.id) is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        name = run.tracker["experiment"]
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = run.id = self._client.create_run(number, run_name=run.name).info.run_id
        parameters = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in leaves(run.config)]
        for first in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            part = parameters[first : first + _PARAMETERS_AT_ONCE]
            self._client.log_batch(self._id, params=part)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[first : first + _METRICS_AT_ONCE])

    def rewind(self, step: int) -> None:
        """Values of a step that comes again stay next to the new ones."""

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioRecord:
    """A run of Trackio."""

    def __init__(self, run: Run) -> None:
        space = run.tracker["space_id"]
        if space is None:
            os.environ["TRACKIO_DIR"] = str(run.folder / "trackio")
        import trackio

        self._trackio = trackio
        first = run.id is None
        # A run is known by its name: folders of one name, such as those of two experiments, would be one.
        name = f"{run.name}-{run.own_id()[:6]}"
        trackio.init(
            project=run.tracker["project"],
            name=name,
            space_id=space,
            config=run.config,
            resume="never" if first else "allow",
            embed=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """Values of a step that comes again stay next to the new ones."""

    def close(self) -> None:
        self._trackio.finish()


class SwanlabRecord:
    """A run of SwanLab."""

    def __init__(self, run: Run) -> None:
        import swanlab

        self._swanlab = swanlab
        swanlab.init(
            project=run.tracker["project"],
            workspace=run.tracker["workspace"],
            experiment_name=run.name,
            id=run.own_id(),
            resume="allow",
            logdir=str(run.folder / "swanlab"),
            mode="cloud" if run.tracker["mode"] == "online" else "offline",
            config=run.config,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._swanlab.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """SwanLab keeps the first values of a step."""

    def close(self) -> None:
        self._swanlab.finish()


RECORDS: Mapping[str, Callable[[Run], Record]] = {
    "tensorboard": TensorBoardRecord,
    "wandb": WandbRecord,
    "mlflow": MlflowRecord,
    "trackio": TrackioRecord,
    "swanlab": SwanlabRecord,
}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines = iter(sys.stdin)
    first = next(lines, None)
    if first is None:
        return
    run = Run(json.loads(first))
    record: Record = RECORDS[run.tracker["name"]](run)
    for line in lines:
        if not line.endswith("\n"):  # the driver was killed while it wrote
            break
        message = json.loads(line)
        if "rewind" in message:
            record.rewind(message["rewind"])
        else:
            record.log(message["step"], {key: float(value) for key, value in message["values"].items()})
    record.close()


if __name__ == "__main__":
    main()
