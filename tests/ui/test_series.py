"""Metrics as columns: what is appended, cut or corrupt, and what of them is drawn."""

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.ui.answers import pack_arrays
from nemorl.ui.series import MetricsFile, MetricsFiles, downsampled, shown_series, smoothed, step_at
from tests.ui.folders import append_steps, make_run, step_metrics
from tests.ui.requests import KEY, Client, asked, get


def read(folder: Path) -> MetricsFile:
    with MetricsFiles().reading(folder / "metrics.jsonl") as metrics:
        return metrics


def test_what_is_appended_is_read_once(tmp_path):
    folder = make_run(tmp_path / "run", steps=2)
    metrics = MetricsFile(folder / "metrics.jsonl")
    assert metrics.refresh()
    assert not metrics.refresh()
    append_steps(folder, [step_metrics(3, entropy=2.0), step_metrics(4)])
    assert metrics.refresh()
    assert metrics.steps == [1, 2, 3, 4]
    np.testing.assert_array_equal(metrics.column("entropy"), [math.nan, math.nan, 2.0, math.nan])
    np.testing.assert_array_equal(metrics.column("unknown"), [math.nan] * 4)
    assert metrics.last("entropy", 2).tolist() == [2.0]
    assert metrics.last("reward/mean", 2).tolist() == [0.03, 0.04]


def test_a_line_counts_when_it_is_complete(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    path = folder / "metrics.jsonl"
    metrics = MetricsFile(path)
    line = json.dumps(step_metrics(2).to_json())
    with path.open("a", encoding="utf-8") as file:
        file.write(line[:20])
    metrics.refresh()
    assert metrics.steps == [1]
    with path.open("a", encoding="utf-8") as file:
        file.write(line[20:] + "\n")
    metrics.refresh()
    assert metrics.steps == [1, 2]


def test_a_file_that_was_cut_is_read_again(tmp_path):
    folder = make_run(tmp_path / "run", steps=5)
    path = folder / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.refresh()
    kept = path.read_text().splitlines(keepends=True)[:2]
    replaced = tmp_path / "new"
    replaced.write_text("".join(kept), encoding="utf-8")
    replaced.replace(path)  # as a resumed run does
    append_steps(folder, [step_metrics(step, entropy=1.0) for step in range(3, 9)])  # longer than before
    assert metrics.refresh()
    assert metrics.steps == [*range(1, 9)]
    path.unlink()
    assert metrics.refresh()
    assert metrics.steps == []


def test_corrupt_lines_are_named_and_the_others_shown(tmp_path):
    folder = make_run(tmp_path / "run", steps=2)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, \n[]\n{"step": "x"}\n\x00\x00\n')
    append_steps(folder, [step_metrics(4)])
    metrics = read(folder)
    assert metrics.steps == [1, 2, 4]
    assert [words.split(" of ")[0] for words in metrics.problems] == ["line 3", "line 4", "line 5", "line 6"]


def test_values_that_are_not_finite_are_kept_with_their_kind(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    append_steps(folder, [step_metrics(2, grad_norm=math.inf, entropy=math.nan)])
    metrics = read(folder)
    assert metrics.column("grad_norm")[1] == math.inf
    assert {(bad.name, bad.kind) for bad in metrics.nonfinite} == {("grad_norm", "inf"), ("entropy", "nan")}
    arrays = shown_series(metrics, ["grad_norm", "entropy"])
    assert len(arrays["y0"]) == len(arrays["y1"]) == 0  # gaps


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=400),
    st.integers(10, 60),
)
def test_each_pixel_keeps_its_least_and_greatest(values, pixels):
    x, y = np.arange(len(values), dtype=float), np.array(values)
    at, shown = downsampled(x, y, pixels)
    finite = np.isfinite(y)
    assert set(zip(at.tolist(), shown.tolist(), strict=True)) <= set(zip(x.tolist(), y.tolist(), strict=True))
    assert len(at) <= 2 * pixels
    assert (np.diff(at) > 0).all()
    if finite.any():
        first, last = x[finite][0], x[finite][-1]
        width = (last - first) / pixels
        for part in range(pixels):  # also of narrower parts than those that were chosen
            low, high = first + part * width, first + (part + 1) * width
            inside = finite & (x >= low) & (x < high)
            drawn = (at >= low - width) & (at < high + width)
            if inside.any() and finite.sum() > 2 * pixels:
                assert shown[drawn].max() >= y[inside].max()
                assert shown[drawn].min() <= y[inside].min()


def test_smoothing_is_a_moving_average_without_bias():
    values = np.array([1.0, math.nan, 3.0, 5.0])
    weight = 0.5
    expected = []
    for end in (1, 3, 4):
        seen = [value for value in values[:end] if not math.isnan(value)]
        weights = [weight ** (len(seen) - 1 - at) for at in range(len(seen))]
        expected.append(np.average(seen, weights=weights))
    found = smoothed(values, weight)
    assert math.isnan(found[1])
    np.testing.assert_allclose(found[[0, 2, 3]], expected, rtol=1e-12)


def test_axes_add_up_tokens_and_seconds(tmp_path):
    metrics = read(make_run(tmp_path / "run", steps=3))
    assert metrics.positions("tokens").tolist() == [100.0, 200.0, 300.0]
    assert metrics.positions("time").tolist() == [1.0, 2.0, 3.0]
    assert step_at(metrics, "tokens", 190.0) == 2


def test_a_range_of_a_chart_is_drawn_in_full(tmp_path):
    folder = make_run(tmp_path / "run", steps=1000)

    async def work(client: Client) -> bytes:
        params = {"run": "run", "names": '["reward/mean"]', "pixels": "20", "low": "100", "high": "130"}
        answer = await client.get("/api/watch/series", params=params, headers=KEY)
        assert answer.status == 200
        return await answer.read()

    body = asked(tmp_path, work)
    x = np.arange(100.0, 131.0)
    assert body == pack_arrays(
        {"x0": x, "y0": x / 100}, {"names": ["reward/mean"], "axis": "step", "num_steps": 1000}
    )
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("route", "name", "value"),
    [
        *(("series", "axis", "age"), ("series", "names", "reward"), ("series", "low", "a")),
        *(("series", name, value) for name in ("low", "high", "pixels") for value in ("nan", "inf", "1e999")),
        *(("series", "smoothing", value) for value in ("1", "-0.1", "nan")),
        *(("step", "at", value) for value in ("nan", "-inf", "x", "")),
    ],
)
def test_wrong_parameters_are_named(tmp_path, route, name, value):
    make_run(tmp_path / "run")
    status, body = get(tmp_path, f"/api/watch/{route}", run="run", **{name: value})
    assert (status, body["place"]) == (400, name)
    assert name in body["error"]


def test_a_place_on_an_axis_is_required(tmp_path):
    make_run(tmp_path / "run")
    assert get(tmp_path, "/api/watch/step", run="run", at="3.4") == (200, {"step": 3})
    assert get(tmp_path, "/api/watch/step", run="run")[1]["place"] == "at"


def test_charts_and_appended_steps_do_not_disturb_each_other(tmp_path):
    """The server reads for several requests at once."""
    folder, files, errors = make_run(tmp_path / "run", steps=5), MetricsFiles(), []

    def draw() -> None:
        try:
            for _ in range(100):
                with files.reading(folder / "metrics.jsonl") as metrics:
                    arrays = shown_series(metrics, ["reward/mean", "entropy"], smoothing=0.5)
                    assert len(arrays["x0"]) == len(metrics.steps)
        except (IndexError, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for step in range(6, 106):
        append_steps(folder, [step_metrics(step, entropy=1.0)])
    for thread in threads:
        thread.join()
    assert errors == []
