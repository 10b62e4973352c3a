"""Results of a sweep, from the folders of its runs: a table (Markdown, CSV, JSON) and a page of curves."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path

import plotly.graph_objects as go

from nemorl.config.sweep import SweepPoint, varied_fields
from nemorl.errors import UsageError

from .files import write_atomically
from .metrics import StepMetrics, format_number, read_metrics
from .report import PALETTE, Chart, add_line, empty_plot, render_page
from .run_folder import RunPaths, read_header
from .sweep import RECORD, Outcome, State, SweepRecord, read_states, state_of
from .timeline import format_seconds

MAX_CURVES = 40  # more are unreadable; the best are drawn


@dataclass(frozen=True)
class PointResult:
    point: SweepPoint
    outcome: Outcome
    run_dir: Path
    steps: tuple[StepMetrics, ...]
    final: float | None  # last value of the metric
    best: float | None
    best_step: int | None
    seconds: float  # of all starts of the run


def read_results(sweep: Path, record: SweepRecord) -> list[PointResult]:
    """Results of all points, the best first; those without a value come last."""
    states = read_states(sweep)
    results = [_result(sweep, point, record, states) for point in record.points]
    sign = -1 if record.mode == "max" else 1
    failed = State.FAILED
    return sorted(
        results,
        key=lambda r: (r.best is None, r.outcome.state == failed, sign * (r.best or 0.0), r.point.index),
    )


def _result(
    sweep: Path, point: SweepPoint, record: SweepRecord, states: Mapping[str, Outcome]
) -> PointResult:
    run_dir = point.run_dir(sweep)
    paths = RunPaths(run_dir)
    steps = tuple(read_metrics(paths.metrics))
    measured = [(s.values[record.metric], s.step) for s in steps if record.metric in s.values]
    finite = [(value, step) for value, step in measured if isfinite(value)]
    pick = max if record.mode == "max" else min
    best, best_step = pick(finite, key=lambda pair: pair[0]) if finite else (None, None)
    seconds = 0.0
    for start in read_header(paths.header):
        if end := start.get("end"):
            times = (datetime.fromisoformat(moment) for moment in (start["started"], end["time"]))
            began, ended = times
            seconds += (ended - began).total_seconds()
    final = measured[-1][0] if measured else None
    outcome = state_of(run_dir, states.get(point.name))
    return PointResult(point, outcome, run_dir, steps, final, best, best_step, seconds)


def write_results(sweep: Path) -> Path:
    """Write the table in three forms and the page; return the Markdown table. Raises `UsageError`."""
    record = SweepRecord.read(sweep)
    if record is None:
        raise UsageError(f"{sweep} holds no sweep: {RECORD} is not there.")
    results, varied = read_results(sweep, record), varied_fields(record.points)
    header, rows = _table(record, results, varied)
    write_atomically(sweep / "results.csv", _csv(header, rows))
    lines = [header, ["---"] * len(header), *[[_cell(value) for value in row] for row in rows]]
    title = (
        f"# {sweep.name}\n\nSorted by the best `{record.metric}` ({record.mode}) of `{record.experiment}`.\n"
    )
    reasons = [
        f"- `{r.point.name}`: {r.outcome.reason} (`{r.run_dir / 'train.log'}`)"
        for r in results
        if r.outcome.state == State.FAILED
    ]
    parts = [title, *("| " + " | ".join(map(str, line)) + " |" for line in lines)]
    parts += ["\nFailed:\n", *reasons] if reasons else []
    write_atomically(sweep / "results.md", "\n".join(parts) + "\n")
    values = [
        {
            **{"point": r.point.name, "values": dict(r.point.values), "status": r.outcome.state.value},
            **{"final": _finite(r.final), "best": r.best, "best_step": r.best_step},
            **{"steps": r.steps[-1].step if r.steps else 0, "seconds": r.seconds},
            **{"path": str(r.run_dir), "reason": r.outcome.reason},
        }
        for r in results
    ]
    summary = {"metric": record.metric, "mode": record.mode, "points": values}
    write_atomically(sweep / "results.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    write_atomically(sweep / "results.html", _page(sweep, record, results, varied, header, rows))
    return sweep / "results.md"


def _table(
    record: SweepRecord, results: Sequence[PointResult], varied: Sequence[str]
) -> tuple[list[str], list[list[object]]]:
    metric = record.metric
    header = ["point", *varied, "status", f"final {metric}", f"best {metric}", "best step", "steps"]
    rows: list[list[object]] = []
    for result in results:
        values = dict(result.point.values)
        cells: list[object] = [result.point.index, *(values[field] for field in varied)]
        cells += [result.outcome.state.value, _finite(result.final), result.best, result.best_step]
        cells += [result.steps[-1].step if result.steps else 0, round(result.seconds, 1)]
        rows.append([*cells, str(result.run_dir)])
    return [*header, "seconds", "path"], rows


def _csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([header, *rows])
    return text.getvalue()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return format_number(value)
    return "-" if value is None else str(value).replace("|", "\\|")


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _page(
    sweep: Path,
    record: SweepRecord,
    results: Sequence[PointResult],
    varied: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> str:
    done = sum(result.outcome.state == State.COMPLETE for result in results)
    best = results[0]
    tiles = [("runs complete", str(done), f"of {len(results)}")]
    if best.best is not None:
        tiles.append((f"best {record.metric}", format_number(best.best), f"step {best.best_step}"))
        tiles += [(field, value, "of the best") for field, value in best.point.values if field in varied]
    tiles.append(("time of all runs", format_seconds(sum(result.seconds for result in results)), ""))
    charts = [_curves(record, results, varied)]
    charts += [_by_field(record, results, field) for field in varied]
    return render_page(
        "sweep.html.j2",
        title=sweep.resolve().name,
        subtitle=f"{record.experiment} · sorted by the best {record.metric} ({record.mode})",
        tiles=tiles,
        charts=[chart for chart in charts if chart.plot.data],
        header=header,
        rows=[[_cell(value) for value in row] for row in rows],
        failures=[r for r in results if r.outcome.state == State.FAILED],
    )


def _curves(record: SweepRecord, results: Sequence[PointResult], varied: Sequence[str]) -> Chart:
    """The metric of each run over its steps."""
    drawn = [result for result in results if result.best is not None][:MAX_CURVES]
    every_step = sorted((step for result in drawn for step in result.steps), key=lambda step: step.step)
    plot = empty_plot(every_step, height=420)
    for number, result in enumerate(drawn):
        values = dict(result.point.values)
        name = ", ".join(f"{field.rpartition('.')[2]}={values[field]}" for field in varied)
        color = PALETTE[number % len(PALETTE)]
        add_line(plot, result.steps, record.metric, f"{result.point.index}: {name}", color, "lines+markers")
    plot.update_layout(showlegend=True, xaxis_title="step", yaxis_title=record.metric)
    more = sum(result.best is not None for result in results) - len(drawn)
    return Chart(record.metric + (f" ({more} more runs are not drawn)" if more else ""), plot, wide=True)


def _by_field(record: SweepRecord, results: Sequence[PointResult], field: str) -> Chart:
    """The best value of each run over one field of the sweep."""
    pairs = [(dict(r.point.values)[field], r.best, r.point.name) for r in results if r.best is not None]
    numbers = [_number(value) for value, _, _ in pairs]
    plot = go.Figure(layout={"template": None, "height": 260, "margin": {"l": 60, "r": 16, "t": 12, "b": 40}})
    plot.update_layout(xaxis_title=field, yaxis_title=f"best {record.metric}", hovermode="closest")
    numeric = [number for number in numbers if number is not None]
    x: Sequence[object] = [value for value, _, _ in pairs]
    if len(numeric) == len(pairs):
        x = numeric
        if numeric and min(numeric) > 0 and max(numeric) >= 10 * min(numeric):
            plot.update_xaxes(type="log")
    else:
        plot.update_xaxes(type="category")
    texts = [name for _, _, name in pairs]
    if pairs:
        marker = {"size": 9, "color": PALETTE[0]}
        plot.add_scatter(x=x, y=[best for _, best, _ in pairs], mode="markers", text=texts, marker=marker)
    return Chart(f"Best {record.metric} by {field}", plot)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
