"""What the screen of a run shows: alarms with their limits, the pipeline, logs and lanes."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.config.schema import describe
from nemorl.observe.live import Live, LiveEngine, LiveStage
from nemorl.ui.alarms import LOW_DISK_BYTES, Alarm, advice, alarms
from nemorl.ui.logs import read_logs
from nemorl.ui.runs import RunStatus
from nemorl.ui.series import MetricsFile
from nemorl.ui.watching import FIELDS_OF_STAGES, lanes, pipeline
from tests.ui.folders import append_steps, make_run, step_metrics
from tests.ui.requests import KEY, Client, asked, get

NOW = 1000.0
PLENTY = 10 * LOW_DISK_BYTES


def metrics_of(tmp_path: Path, steps: int = 5, **values: float) -> MetricsFile:
    """Steps of a second each, all with these values."""
    folder = make_run(tmp_path / "run", steps=0)
    named = {name.replace("__", "/"): value for name, value in values.items()}
    append_steps(folder, [step_metrics(step, **named) for step in range(1, steps + 1)])
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.refresh()
    return metrics


def live_of(*stages: LiveStage, engines: tuple[LiveEngine, ...] = ()) -> Live:
    return Live(1, "here", NOW, 5, 10, NOW, stages, engines)


def found(metrics: MetricsFile, live: Live | None = None, free: int = PLENTY) -> list[Alarm]:
    return alarms(RunStatus("running", live=live or live_of()), metrics, None, free, NOW)


def stage(name: str, seconds: float, deadline: float | None = None) -> LiveStage:
    return LiveStage(name, NOW - seconds, 3, 8, "trajectories", 100, deadline)


def test_a_healthy_run_has_no_alarm(tmp_path):
    assert found(metrics_of(tmp_path), live_of(stage("generation", 0.5))) == []


@pytest.mark.parametrize(
    ("values", "title", "part_of_filter"),
    [
        ({"group__zero_variance": 0.5}, "groups have no spread of rewards", "-1e-6 < advantage < 1e-6"),
        ({"stop__length": 0.25}, "answers are truncated", 'stop == "length"'),
        ({"updates__skipped": 0.1}, "updates were skipped", ""),
        ({"reward_errors__math": 2.0}, "the reward math failed", "step >= 3"),
        ({"environment__errors": 0.1}, "environments failed", "failed"),
        ({"grad_norm": float("inf")}, "metrics are not finite", ""),
    ],
)
def test_each_metric_has_its_limit(tmp_path, values, title, part_of_filter):
    (alarm,) = found(metrics_of(tmp_path, steps=7, **values))
    assert alarm.title == title
    assert alarm.value
    assert part_of_filter in alarm.filter
    below = {name: value * 0.9 if value >= 0.25 and value < 1 else 0.0 for name, value in values.items()}
    assert found(metrics_of(tmp_path / "below", steps=7, **below)) == []


def test_a_stage_is_slow_beyond_six_medians_of_at_least_three(tmp_path):
    """A generation takes 0.6 s."""
    few, enough = metrics_of(tmp_path / "few", steps=2), metrics_of(tmp_path / "enough", steps=3)
    long = live_of(stage("generation", 7.0))
    assert found(few, long) == []
    (alarm,) = found(enough, long)
    assert alarm.title == "generation takes longer than usual"
    assert "3 of 8 trajectories" in alarm.value
    assert "0.6 s" in alarm.limit
    assert found(enough, live_of(stage("generation", 3.5))) == []
    assert found(enough, live_of(stage("other", 1000.0))) == []


def test_half_a_deadline_is_an_alarm_without_a_median(tmp_path):
    metrics = metrics_of(tmp_path, steps=0)
    (alarm,) = found(metrics, live_of(stage("refit", 301.0, deadline=600.0)))
    assert (alarm.title, alarm.fields) == ("refit is close to its deadline", ("cluster.deadlines.refit",))
    assert found(metrics, live_of(stage("refit", 299.0, deadline=600.0))) == []


def test_engines_that_are_lost_silent_or_stuck_are_named(tmp_path):
    metrics = metrics_of(tmp_path)
    engines = (
        LiveEngine("a", "lost", "its node is gone"),
        LiveEngine("b", "up"),
        LiveEngine("c", "up", version=3, running=2, waiting=0, seconds_since_step=100.0),
        LiveEngine("d", "up", version=3, running=0, waiting=0, seconds_since_step=100.0),
        LiveEngine("e", "up", version=3, running=2, waiting=0, seconds_since_step=1.0),
    )
    titles = [alarm.title for alarm in found(metrics, live_of(engines=engines))]
    assert titles == ["a is lost", "b does not answer", "c makes no progress"]


def test_a_full_disk_and_an_end_are_alarms(tmp_path):
    metrics = metrics_of(tmp_path)
    (alarm,) = found(metrics, free=LOW_DISK_BYTES - 1)
    assert alarm.title == "the disk is nearly full"
    (alarm,) = alarms(RunStatus("failed", "of memory"), metrics, None, 0, NOW)
    assert (alarm.title, alarm.value, alarm.is_fatal) == ("the run failed", "of memory", True)


def test_a_loss_of_engines_is_an_alarm_while_it_is_recent(tmp_path):
    folder = make_run(tmp_path / "run", steps=0)
    lost = [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    append_steps(
        folder, [step_metrics(at + 1, **{"generation/replicas_lost": n}) for at, n in enumerate(lost[:5])]
    )
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.refresh()
    assert [alarm.title for alarm in found(metrics)] == ["engines were lost"]
    append_steps(folder, [step_metrics(at, **{"generation/replicas_lost": 1}) for at in range(6, 11)])
    metrics.refresh()
    assert found(metrics) == []


def test_advice_names_what_is_idle(tmp_path):
    metrics = metrics_of(tmp_path, idle__policy=0.7, idle__generation=0.1)
    (one,) = advice(metrics, None)
    assert "policy have no work for 70 %" in one.text
    assert list(advice(metrics_of(tmp_path / "busy", idle__policy=0.2, idle__generation=0.3), None)) == []


def test_every_field_that_is_named_exists():
    known = {field.path for field in describe()}
    sections = {path.partition(".")[0] for path in known} | {path.rpartition(".")[0] for path in known}
    texts = Path("nemorl/ui/alarms.py").read_text(encoding="utf-8")
    named = {field for fields in FIELDS_OF_STAGES.values() for field in fields}
    named |= set(re.findall(r'"((?:algorithm|generation|policy|checkpointing)\.[a-z_.]+)"', texts))
    assert len(named) > 15
    assert named - known - sections == set()


def test_stages_are_in_the_order_of_a_step_and_the_longest_is_the_bottleneck(tmp_path):
    metrics = metrics_of(tmp_path, steps=30)
    rows = {row.name: row for row in pipeline(metrics, live_of(stage("training", 2.0)), NOW)}
    assert list(rows) == ["generation", "training", "refit"]
    assert [row.is_bottleneck for row in rows.values()] == [True, False, False]
    assert rows["generation"].share == pytest.approx(0.6)
    training = rows["training"]
    assert (training.is_open, training.done, training.total) == (True, 3, 8)
    assert training.tokens_per_second == pytest.approx(50.0)
    assert not rows["generation"].is_open


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.floats(0, 10), max_size=3))
def test_shares_are_of_the_whole_step(stages):
    metrics = MetricsFile(Path("none"))
    whole = sum(stages.values()) or 1.0
    line = {"step": 1, "version": 1, "time/step": whole} | {f"time/{name}": s for name, s in stages.items()}
    metrics._add(json.dumps(line).encode())
    shares = [row.share or 0.0 for row in pipeline(metrics, None, NOW)]
    assert sum(shares) == pytest.approx(1.0 if any(stages.values()) else 0.0)


def test_logs_are_merged_by_time_with_lines_that_continue_others(tmp_path):
    (tmp_path / "driver.log").write_text(
        "2026-01-01 10:00:02,500 WARNING nemorl.x: second\nof two lines\n", encoding="utf-8"
    )
    (tmp_path / "policy-0.log").write_text(
        "2026-01-01 10:00:01,000 INFO a: First\n2026-01-01 10:00:03,000 ERROR a: third\n", encoding="utf-8"
    )
    logs = read_logs(tmp_path)
    texts = [line.text.split(": ")[-1] for line in logs.lines]
    assert texts == ["First", "second", "of two lines", "third"]
    assert [line.level for line in logs.lines] == ["INFO", "WARNING", "WARNING", "ERROR"]
    assert logs.sources == ["driver", "policy-0"]
    assert [line.text for line in read_logs(tmp_path, find="FIRST").lines] == [logs.lines[0].text]
    assert len(read_logs(tmp_path, level="WARNING").lines) == 3
    assert len(read_logs(tmp_path, source="driver").lines) == 2


def test_of_a_large_log_the_end_is_read(tmp_path):
    line = "x" * 1_000_000
    (tmp_path / "driver.log").write_text(f"first\n{line}\n{line}\n{line}\nlast\n", encoding="utf-8")
    logs = read_logs(tmp_path)
    assert logs.left_out == ["driver.log"]
    assert logs.lines[-1].text == "last"
    assert max(len(line.text) for line in logs.lines) <= 4000


def test_lanes_are_of_the_last_steps(tmp_path):
    def event(track: int, name: str, start: float, seconds: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "tid": track, "ts": start * 1e6, "dur": seconds * 1e6}

    def name(track: int, of: str) -> dict[str, Any]:
        return {"ph": "M", "name": "thread_name", "tid": track, "args": {"name": of}}

    events = [name(0, "steps"), name(1, "training")]
    for step in range(10):
        events += [event(0, f"step {step}", step, 1.0), event(1, "training", step + 0.5, 0.25)]
    lines = "".join(f",{json.dumps(each)}\n" for each in events)
    (tmp_path / "timeline.json").write_text(f"[\n{lines}", encoding="utf-8")
    shown = lanes(tmp_path / "timeline.json", steps=3)
    assert [step[0] for step in shown["steps"]] == ["step 7", "step 8", "step 9"]
    assert shown["tracks"] == [
        {"name": "training", "spans": [("training", at + 0.5, 0.25) for at in (7, 8, 9)]}
    ]
    assert lanes(tmp_path / "none.json") == {"tracks": [], "steps": []}


def test_a_run_of_another_release_is_shown_without_its_config(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").write_text("algorithm: {name: of_the_future}\n", encoding="utf-8")
    status, state = get(tmp_path, "/api/watch/state", run="run")
    assert status == 200
    assert any("another release" in words for words in state["problems"])
    assert state["num_steps"] == 5
    assert [group["title"] for group in state["groups"]][:2] == ["Reward", "Seconds of each stage"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\npolicy: [\n", "config.yaml, line 3 cannot be read: invalid YAML"),
        ("seed: 1\nseed: 2\n", "config.yaml, line 2 cannot be read: seed: duplicate key"),
        (b"\xff", "config.yaml cannot be read: the file is not UTF-8 text"),
        ("seed: 1\nsede: 2\n", "config.yaml, line 2 is of another release of nemorl, or was edited: sede: "),
    ],
)
def test_a_config_that_cannot_be_read_says_what_is_wrong_and_where(tmp_path, text, words):
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    (problem,) = get(tmp_path, "/api/watch/state", run="run")[1]["problems"]
    assert problem.startswith(words)


def test_the_state_is_sent_again_when_the_run_writes(tmp_path):
    folder = make_run(tmp_path / "run", live={})

    async def work(client: Client) -> list[int]:
        answer = await client.get("/api/watch/follow", params={"run": "run"}, headers=KEY)
        seen = []
        for _ in range(2):
            line = await answer.content.readuntil(b"\n\n")
            seen.append(json.loads(line.removeprefix(b"data: "))["num_steps"])
            append_steps(folder, [step_metrics(6)])
        return seen

    began = time.monotonic()
    assert asked(tmp_path, work) == [5, 6]
    assert time.monotonic() - began < 30
