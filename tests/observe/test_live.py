"""`live.json` during a run, after its end and where it cannot be written."""

import io
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemorl.config.run import LoggerConfig
from nemorl.errors import RunStopped
from nemorl.observe import live
from nemorl.observe.live import Live, LiveEngine, LiveStage, LiveWorker, read_live
from nemorl.observe.observer import Observer
from nemorl.observe.run_folder import RunFolder
from tests.observe.examples import CONFIG

PLAIN = LoggerConfig(console="plain")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD_SECONDS", 0.01)


def shown(path: Path, has: Callable[[Live], bool]) -> Live:
    """The content, once it fulfills a condition."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if (content := read_live(path)) is not None and has(content):
            return content
        time.sleep(0.01)
    raise AssertionError(f"never shown; the last content: {read_live(path)}")


def opened(folder: RunFolder, total_steps: int = 3) -> Observer:
    deadlines = {"generation": 60.0}
    return Observer(folder, PLAIN, total_steps=total_steps, deadlines=deadlines, stream=io.StringIO())


def test_stages_engines_and_steps_while_they_run(run_dir):
    folder = RunFolder.create(run_dir, CONFIG)
    with opened(folder) as observer:
        with observer.stage("generation", total=8, unit="groups") as stage, observer.stage("reference"):
            stage.advance(3, tokens=40)
            observer.live.engines = [LiveEngine("replica 0", "up", version=4, running=2)]
            observer.live.workers = [LiveWorker("policy", 1, "")]
            now = shown(folder.paths.live, lambda content: bool(content.workers))
            assert now.stages[0] == LiveStage("generation", stage.started, 3, 8, "groups", 40, 60.0)
            assert [(each.name, each.deadline) for each in now.stages[1:]] == [("reference", None)]
            assert now.engines == [LiveEngine("replica 0", "up", version=4, running=2)]
            assert (now.pid, now.step, now.total_steps, now.end) == (os.getpid(), 0, 3, None)
        observer.end_step(1)
        now = shown(folder.paths.live, lambda content: content.step == 1)
        assert now.stages == []
        assert now.step_started <= time.time()
        observer.rewind(0)
        shown(folder.paths.live, lambda content: content.step == 0)
    assert read_live(folder.paths.live).end.outcome == "complete"


@pytest.mark.parametrize(
    ("error", "outcome"), [(RunStopped("by SIGTERM"), "stopped"), (ValueError("wrong"), "failed")]
)
def test_how_a_run_ended(run_dir, error, outcome):
    folder = RunFolder.create(run_dir, CONFIG)
    with pytest.raises(type(error)), opened(folder):
        raise error
    end = read_live(folder.paths.live).end
    assert (end.outcome, end.error) == (outcome, str(error))


def test_a_file_that_cannot_be_written_costs_one_warning(run_dir, caplog):
    folder = RunFolder.create(run_dir, CONFIG)
    folder.paths.live.mkdir()
    with opened(folder) as observer:
        time.sleep(0.1)
        observer.step(1, version=1, values={})
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "live.json" in warnings[0]


def test_a_file_of_another_release_is_none(tmp_path):
    path = tmp_path / "live.json"
    assert read_live(path) is None
    path.write_text('{"pid": "x"}')
    assert read_live(path) is None
    path.write_text("{")
    assert read_live(path) is None
