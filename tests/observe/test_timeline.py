"""timeline.json is a JSON array at every moment, and what a crash leaves can be gone on from."""

import json
import os

import pytest

from nemorl.observe.files import WriteError
from nemorl.observe.timeline import Stages, Timeline
from tests.full_disk import files_end_at


def spans(events):
    return [event["name"] for event in events if event["ph"] == "X"]


def test_each_stage_is_a_span_on_its_own_track(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, title="my run")
    stages = Stages([timeline])
    with stages.stage("generation", unit="trajectories") as stage:
        stage.advance(8)
    assert spans(json.loads(path.read_text())) == ["generation"]  # whole although it is not closed
    with pytest.raises(OSError, match="gone"), stages.stage("training"):
        raise OSError("gone")
    stages.finish_step(1)
    timeline.close()

    events = json.loads(path.read_text())
    assert spans(events) == ["generation", "training", "step 1"]
    by_name = {event["name"]: event for event in events if event["ph"] == "X"}
    assert by_name["generation"]["args"] == {"done": 8, "unit": "trajectories"}
    assert by_name["training"]["args"] == {"outcome": "failed"}
    step, generation, training = (by_name[name] for name in ("step 1", "generation", "training"))
    assert {event["pid"] for event in events} == {os.getpid()}
    assert len({step["tid"], generation["tid"], training["tid"]}) == 3
    # Microseconds; the step holds its stages. The wall clock and the stopwatch may differ a little.
    assert generation["ts"] + generation["dur"] <= training["ts"] + 1000
    assert step["ts"] <= generation["ts"] + 1000
    assert step["dur"] >= generation["dur"] + training["dur"]


@pytest.mark.parametrize("torn", [0, 1, 2, 5, 40])
def test_a_partial_file_is_continued(tmp_path, torn):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    stages = Stages([timeline])
    for name in ("generation", "training"):
        with stages.stage(name):
            pass
    timeline.close()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - torn])

    timeline = Timeline(path)
    with Stages([timeline]).stage("refit"):
        pass
    timeline.close()
    survived = ["generation", "training"] if torn <= 2 else ["generation"]
    assert spans(json.loads(path.read_text())) == [*survived, "refit"]


def test_an_empty_file_is_begun(tmp_path):
    path = tmp_path / "timeline.json"
    path.touch()
    Timeline(path).close()
    assert spans(json.loads(path.read_text())) == []


def test_a_full_disk_leaves_whole_events(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    stages = Stages([timeline])
    with (
        files_end_at(path.stat().st_size + 20),
        pytest.raises(WriteError, match=r"timeline\.json could not be written"),
        stages.stage("training"),
    ):
        pass
    timeline.close()
    Timeline(path).close()
    json.loads(path.read_text())
