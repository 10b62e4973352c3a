"""Run folders for tests of the web app, with what a run of a few steps writes."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nemorl.observe.live import Live, LiveEnd
from nemorl.observe.metrics import StepMetrics

STAGES = {"generation": 0.6, "training": 0.3, "refit": 0.1}


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def step_metrics(step: int, **changes: float) -> StepMetrics:
    """A step of a second."""
    values = {f"time/{name}": seconds for name, seconds in STAGES.items()} | {"time/step": 1.0}
    values |= {"reward/mean": step / 100, "loss/policy": -0.1 / step, "tokens/trained": 100.0}
    return StepMetrics(step, step, values | changes)


def append_steps(folder: Path, steps: Sequence[StepMetrics]) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(step.to_json()) + "\n" for step in steps)


def make_run(
    folder: Path,
    steps: int = 5,
    *,
    started: float | None = None,
    command: str = "nemorl train experiment.yaml",
    end: Mapping[str, str] | None = None,
    pid: int | None = None,
    host: str | None = None,
    live: Mapping[str, Any] | None = None,
) -> Path:
    """A run folder; `live` are fields of live.json, without which there is none."""
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("run_dir: runs/made\n", encoding="utf-8")
    began = time.time() if started is None else started
    start: dict[str, Any] = {"started": moment(began), "command": command}
    start["run"] = {"algorithm": "grpo", "model": "models/tiny", "policy device": "cpu", "steps": "10"}
    start["machine"] = {"host": os.uname().nodename}
    if end is not None:
        start["end"] = dict(end)
    (folder / "header.json").write_text(json.dumps([start]), encoding="utf-8")
    append_steps(folder, [step_metrics(number) for number in range(1, steps + 1)])
    where = host or os.uname().nodename
    if pid is not None:
        (folder / ".lock").write_text(f"{pid} on {where}\n", encoding="utf-8")
    if live is not None:
        write_live(folder, pid=pid or 0, host=where, **live)
    return folder


def write_live(folder: Path, end: LiveEnd | None = None, **fields: Any) -> None:
    known: dict[str, Any] = {"pid": 0, "host": os.uname().nodename, "written": time.time(), "step": 5}
    known |= {"total_steps": 10, "step_started": time.time(), "end": end} | fields
    (folder / "live.json").write_text(json.dumps(asdict(Live(**known))), encoding="utf-8")
