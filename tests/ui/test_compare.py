"""Compared runs: intervals of scipy's paired t test, tasks paired by plain Python, fields that differ."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from nemorl.observe.index import IndexWriter, TrajectoryRow
from nemorl.ui.compare import (
    Curves,
    config_differences,
    pair_tasks,
    paired_interval,
    same_data,
    t_quantile,
)
from nemorl.ui.series import MetricsFiles
from nemorl.ui.trajectories import Tables, TrajectoryTable
from tests.ui.stored_runs import make_run


@pytest.mark.parametrize(
    ("degrees", "value"),  # of printed tables
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042), (10**6, 1.960)],
)
def test_quantiles_are_those_of_tables(degrees: int, value: float) -> None:
    assert t_quantile(degrees) == pytest.approx(value, rel=1.4e-3)


@pytest.mark.parametrize("count", [2, 3, 5, 40])
def test_intervals_are_those_of_a_paired_t_test(count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    before, after = np.random.default_rng(count).normal(size=(2, count))
    expected = stats.ttest_rel(after, before).confidence_interval(0.95)
    mean, low, high = paired_interval(after - before)
    assert mean == pytest.approx(float((after - before).mean()))
    assert (low, high) == pytest.approx((expected.low, expected.high), rel=3e-3, abs=3e-3)


def test_few_tasks_have_no_interval() -> None:
    assert all(map(math.isnan, paired_interval(np.zeros(0))))
    mean, low, high = paired_interval(np.array([0.5]))
    assert mean == 0.5
    assert math.isnan(low)
    assert math.isnan(high)


def table_of(folder: Path, rows: list[tuple[str, int, int, float]]) -> TrajectoryTable:
    """Rows of (set, task, step, reward)."""
    IndexWriter(folder / "trajectories").append(
        TrajectoryRow(
            step=step, phase="validation", validation_set=of_set, group=task, sample=0, task=task, turns=1,
            tokens=1, sampled=1, reward=reward, stop="stop", min_version=0, max_version=0,
            seconds_generation=0.0, seconds_environment=0.0,
        )
        for of_set, task, step, reward in rows
    )  # fmt: skip
    return Tables().open(folder)


def test_tasks_are_paired_by_set_and_number(tmp_path: Path) -> None:
    first = table_of(
        tmp_path / "a",
        [
            ("easy", 1, 0, 1.0),
            ("easy", 1, 2, 0.0),
            ("easy", 1, 2, 0.5),
            ("hard", 1, 2, 1.0),
            ("easy", 5, 2, 1.0),
        ],
    )
    second = table_of(
        tmp_path / "b",
        [("hard", 1, 4, 0.25), ("easy", 1, 4, 0.75), ("easy", 2, 4, 1.0), ("easy", 1, 3, math.nan)],
    )
    paired = pair_tasks(first, second)
    found = {(task.validation_set, task.task): task.difference for task in paired.tasks}
    assert found == {("easy", 1): 0.5, ("hard", 1): -0.75}
    assert [abs(task.difference) for task in paired.tasks] == [0.75, 0.5]  # the largest first
    assert (paired.count, paired.improved, paired.worse, paired.only_first, paired.only_second) == (
        2,
        1,
        1,
        1,
        1,
    )
    assert (paired.first_mean, paired.second_mean, paired.difference) == (0.625, 0.5, -0.125)
    easy = next(task for task in paired.tasks if task.validation_set == "easy")
    assert (easy.first.mean, easy.first.count, easy.first.step) == (0.25, 2, 2)
    of_all = pair_tasks(first, second, "validation_set == 'easy'", last=False)
    assert [task.first.mean for task in of_all.tasks] == [0.5]
    none = pair_tasks(first, second, "validation_set == 'none'")
    assert none.count == 0
    assert math.isnan(none.difference)


def test_a_better_run_is_better(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", better=0.25)
    paired = pair_tasks(Tables().open(one), Tables().open(other), "phase == 'validation'")
    assert [task.difference for task in paired.tasks] == [0.5, 0.5, 0.5, 0.0]  # weight 2 x 0.25
    assert (paired.difference, paired.improved) == (0.375, 3)
    assert paired.low == pytest.approx(0.375 - 3.182 * 0.125, rel=0.05)  # s = 0.25, n = 4
    assert same_data([one, other]) is True
    assert same_data([one, tmp_path]) is None


def test_fields_that_differ(tmp_path: Path) -> None:
    configs = {
        "a": {"run_dir": "x", "seed": 1, "policy": {"lr": 1e-4, "layers": [1, 2]}, "same": {"deep": None}},
        "b": {"run_dir": "y", "seed": 2, "policy": {"layers": [1, 2]}, "same": {"deep": None}},
        "c": {"run_dir": "z", "seed": 1, "policy": {"lr": 1e-4, "layers": [1]}, "same": {"deep": None}},
    }
    runs = {name: tmp_path / name for name in configs}
    for name, config in configs.items():
        runs[name].mkdir()
        (runs[name] / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    found = config_differences(runs)
    assert [(each.field, each.values, each.given) for each in found.fields] == [
        ("seed", [1, 2, 1], [True] * 3),
        ("policy.layers", [[1, 2], [1, 2], [1]], [True] * 3),
        ("policy.lr", [1e-4, None, 1e-4], [True, False, True]),
    ]
    (runs["b"] / "config.yaml").write_text("seed: [1\n")
    broken = config_differences(runs)
    assert [each.field for each in broken.fields] == ["policy.layers"]
    assert "config.yaml cannot be read" in broken.notes[0]
    assert "line 2" in broken.notes[0]


def test_curves_are_of_the_runs_that_have_the_metric(tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("a", "b", "c")}
    for name, losses in {"a": [0.5, 0.25], "b": [1.0]}.items():
        runs[name].mkdir()
        lines = [{"step": n, "loss": loss, "time/step": 2.0} for n, loss in enumerate(losses, 1)]
        of_run = {"a": [*lines, "no line"], "b": lines}[name]
        (runs[name] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in of_run))
    curves = Curves(MetricsFiles())
    arrays, facts = curves.of(runs, "loss", "time", smoothing=0.5)
    assert {name: line.tolist() for name, line in arrays.items()} == {
        **{"x0": [2, 4], "y0": [0.5, 0.25], "t0": [2, 4], "s0": pytest.approx([0.5, 1 / 3])},
        **{"x1": [2], "y1": [1.0], "t1": [2], "s1": [1.0]},
    }
    assert facts == {"missing": ["c"]}
    names = curves.names(runs)
    assert names.metrics == {"loss": 2, "time/step": 2}
    assert names.notes == ["a: line 3 of metrics.jsonl is no step's metrics and is left out"]
