"""The results of a sweep, from run folders that are written by hand."""

import csv
import json
import re
from pathlib import Path

import pytest

from nemorl.config.sweep import parse_axes, sweep_points
from nemorl.errors import UsageError
from nemorl.observe.sweep import Outcome, State, SweepRecord, write_states
from nemorl.observe.sweep_results import read_results, write_results

POINTS = tuple(sweep_points(parse_axes(["policy.optimizer.lr=1e-5,1e-4,1e-3", "seed=7"])))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three runs: complete, failed after a step, and not started."""
    folder = tmp_path / "lr"
    curves = [[0.1, 0.5, 0.4], [0.7], []]
    for point, rewards in zip(POINTS, curves, strict=True):
        run_dir = point.run_dir(folder)
        if not rewards:
            continue
        run_dir.mkdir(parents=True)
        lines = [
            {"step": step, "version": step, "reward/mean": reward, "time/step": 2.0}
            for step, reward in enumerate(rewards, start=1)
        ]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        end = {"time": "2026-01-01T00:01:30+00:00", "outcome": "complete", "error": ""}
        if len(rewards) < 3:
            end |= {"outcome": "failed", "error": "engine 0 <lost>\nmore"}
        (run_dir / "header.json").write_text(
            json.dumps([{"started": "2026-01-01T00:00:00+00:00", "end": end}])
        )
    record = SweepRecord("grpo.yaml", "reward/mean", "max", POINTS)
    (folder / "sweep.json").write_text(record.text())
    return folder


def test_results_are_sorted_by_the_best_value_of_runs_that_did_not_fail(sweep: Path) -> None:
    record = SweepRecord.read(sweep)
    assert record is not None
    assert record.points == POINTS
    complete, failed, waiting = read_results(sweep, record)
    assert (complete.final, complete.best, complete.best_step, complete.seconds) == (0.4, 0.5, 2, 90.0)
    assert (failed.outcome, failed.best) == (Outcome(State.FAILED, "engine 0 <lost>"), 0.7)
    assert (waiting.outcome.state, waiting.best) == (State.WAITING, None)


def test_the_table_in_three_forms(sweep: Path) -> None:
    text = write_results(sweep).read_text(encoding="utf-8")
    assert "| 1 | 1e-4 | failed | 0.7 | 0.7 | 1 | 1 | 90 |" in text
    assert "seed" not in text.splitlines()[4]  # it is the same for all
    assert re.search(r"- `01_lr=1e-4_seed=7`: engine 0 <lost> \(`.*train.log`\)", text)
    rows = list(csv.DictReader((sweep / "results.csv").open(encoding="utf-8")))
    assert [row["policy.optimizer.lr"] for row in rows] == ["1e-5", "1e-4", "1e-3"]
    summary = json.loads((sweep / "results.json").read_text(encoding="utf-8"))
    assert [point["status"] for point in summary["points"]] == ["complete", "failed", "waiting"]


def test_what_the_driver_saw_counts_where_a_run_wrote_no_end(sweep: Path) -> None:
    write_states(sweep, {POINTS[2].name: Outcome(State.FAILED, "exit status 2: lr = -1")})
    assert "exit status 2: lr = -1" in write_results(sweep).read_text(encoding="utf-8")


def test_the_page_needs_no_network(sweep: Path) -> None:
    write_results(sweep)
    page = (sweep / "results.html").read_text(encoding="utf-8")
    assert page.count('type="application/json" data-plot') == 2  # the curves, and the best by learning rate
    assert "default-src 'none'" in page
    assert "engine 0 &lt;lost&gt;" in page
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=", page)


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no sweep"):
        write_results(tmp_path)
