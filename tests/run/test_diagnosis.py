"""What `nemorl doctor` concludes from the files of a run."""

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from nemorl.cluster.logs import START_OF_LOG
from nemorl.errors import RunStopped, UsageError
from nemorl.observe.files import WriteError
from nemorl.observe.metrics import StepMetrics
from nemorl.observe.run_folder import RunFolder
from nemorl.run.diagnosis import Condition, diagnose


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that is held by this process and has taken a step."""
    folder = RunFolder.create(tmp_path, "")
    values = {"time/step": 1.0, "generation/replicas_lost": 2.0, "loss/policy": float("nan")}
    values |= {"rollout/workers_lost": 3.0, "rollout/restarts_failed": 0.0, "models/restarts": 1.0}
    folder.paths.metrics.write_text(json.dumps(StepMetrics(1, 1, values).to_json()) + "\n", encoding="utf-8")
    return folder


def age(folder: RunFolder, seconds: float) -> None:
    """Make the run and its last step this old."""
    content = json.loads(folder.paths.header.read_text(encoding="utf-8"))
    content[-1]["started"] = "2020-01-01T00:00:00+00:00"
    folder.paths.header.write_text(json.dumps(content), encoding="utf-8")
    last = folder.paths.metrics.stat().st_mtime - seconds
    os.utime(folder.paths.metrics, (last, last))


def test_a_run_that_makes_steps_is_healthy(folder: RunFolder) -> None:
    found = diagnose(folder.paths.root)
    assert (found.condition, found.cause) == (Condition.HEALTHY, "")
    assert f"the driver is process {os.getpid()} on {os.uname().nodename}" in found.facts
    lost = [fact for fact in found.facts if "so far" in fact or "restarts of" in fact]
    assert lost == [
        "losses of engines so far: 2",
        "losses of rollout workers so far: 3",
        "restarts of models so far: 1",
    ]
    assert "not finite in the last step: loss/policy" in found.facts


def test_processes_of_an_earlier_start_are_not_missed(folder: RunFolder) -> None:
    paths = folder.paths
    paths.logs.mkdir(exist_ok=True)
    log = paths.logs / "policy-0.log"
    start = f"{START_OF_LOG} policy-0 process 999999999 on {os.uname().nodename} "
    log.write_text(f"{start}\n", encoding="utf-8")
    gone = [fact for fact in diagnose(paths.root).facts if "is gone" in fact]
    assert len(gone) == 1
    started = json.loads(paths.header.read_text(encoding="utf-8"))[-1]["started"]
    earlier = datetime.fromisoformat(started).timestamp() - 60
    for file in (log, paths.metrics):
        os.utime(file, (earlier, earlier))
    found = diagnose(paths.root)
    assert not [fact for fact in found.facts if "is gone" in fact]
    assert [fact for fact in found.facts if fact.startswith("started after step 1 ")]


def test_a_run_without_a_step_for_long_hangs(folder: RunFolder) -> None:
    age(folder, 3600)
    found = diagnose(folder.paths.root)
    assert (found.condition, found.cause) == (Condition.HANGING, "no step since 1 h 00 min")


def test_a_driver_that_left_no_record_died(folder: RunFolder) -> None:
    folder.close()
    found = diagnose(folder.paths.root)
    assert found.condition is Condition.DIED
    assert "was killed" in found.cause
    assert found.commands[-1].endswith("--resume")


@pytest.mark.parametrize(
    ("error", "condition", "cause"),
    [
        (None, Condition.COMPLETE, ""),
        (RunStopped("Stopped by SIGTERM after step 1."), Condition.STOPPED, ""),
        (
            WriteError("weight_0 cannot be written: No space left on device"),
            Condition.FAILED,
            "a disk is full",
        ),
        (ValueError("strange"), Condition.FAILED, "strange"),
    ],
)
def test_how_a_run_ended(
    folder: RunFolder, error: Exception | None, condition: Condition, cause: str
) -> None:
    folder.record_end(error)
    folder.close()
    found = diagnose(folder.paths.root)
    assert (found.condition, found.cause) == (condition, cause)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        diagnose(tmp_path)
