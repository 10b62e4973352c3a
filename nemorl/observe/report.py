"""report.html: a run as one page that needs no network, with Plotly's script in it and escaped texts."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
import yaml
from plotly.offline import get_plotlyjs

from nemorl.errors import UsageError

from .files import write_atomically
from .metrics import (
    SHOWN,
    Sample,
    StepMetrics,
    format_number,
    metric_groups,
    read_metrics,
    read_samples,
    shown,
)
from .run_folder import RunPaths, read_header
from .timeline import format_seconds

SAMPLES_SHOWN = 3  # of the first step, and of the last
MAX_CHARACTERS = 4000  # of one text
REST_COLOR = "#8c8c94"
PALETTE = ("#4a8bd0", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#d4a514", "#9d7660", REST_COLOR)
MAX_BARS = 200  # more steps than this are averaged in groups
Steps = Sequence[StepMetrics]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` of a run and return its path. Raises `UsageError` without a run, `WriteError`."""
    paths = RunPaths(run_dir)
    if not paths.holds_run:
        raise UsageError(f"{run_dir} holds no run: neither config.yaml nor metrics.jsonl is there.")
    steps = read_metrics(paths.metrics)
    config_text = paths.config.read_text(encoding="utf-8") if paths.config.exists() else ""
    config = yaml.safe_load(config_text) or {}
    algorithm = config.get("algorithm", {})
    subtitle = (algorithm.get("name"), config.get("policy", {}).get("model_path"), _state(algorithm, steps))
    starts = read_header(paths.header)
    totals, (main, more) = stage_totals(steps), metric_charts(steps)
    page = render_page(
        "report.html.j2",
        title=run_dir.resolve().name,
        subtitle=" · ".join(str(part) for part in subtitle if part),
        tiles=list(_tiles(steps, algorithm.get("num_steps"))),
        lead=reward_chart(steps),
        main=main,
        stages=stage_chart(steps, totals),
        totals=totals,
        more=more,
        last=steps[-1] if steps else None,
        samples=list(_sample_groups(read_samples(paths.samples))),
        facts=_flatten(starts[-1]) if starts else {},
        starts=starts,
        config=config_text,
    )
    write_atomically(paths.report, page)
    return paths.report


def render_page(template: str, **values: Any) -> str:
    """A page that extends `page.html.j2`, with everything in it that it shows."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": format_number, "seconds": format_seconds, "cut": _cut}
    return environment.get_template(template).render(plotly=get_plotlyjs(), **values)


def _state(algorithm: Mapping[str, Any], steps: Steps) -> str:
    planned, stop = algorithm.get("num_steps"), algorithm.get("early_stop") or {}
    if steps and isinstance(planned, int) and steps[-1].step >= planned:
        return "finished"
    patience, waited = stop.get("patience"), steps[-1].values.get("early_stop/waited", 0.0) if steps else 0.0
    if isinstance(patience, int) and waited >= patience:
        return f"finished early, as {stop.get('metric')} got no better"
    return "not finished"


def _tiles(steps: Steps, planned: object) -> Iterator[tuple[str, str, str]]:
    done = steps[-1].step if steps else 0
    yield "steps", f"{done:,}", f"of {planned:,}" if isinstance(planned, int) else ""
    for row in SHOWN:
        values = [step.values[row.prefix] for step in steps if row.tile and row.prefix in step.values]
        if values:
            yield row.tile, format_number(values[-1]), f"from {format_number(values[0])}"
    yield "time of all steps", format_seconds(sum(step.values.get("time/step", 0.0) for step in steps)), ""
    if tokens := sum(step.values.get("tokens/trained", 0.0) for step in steps):
        yield "tokens trained", f"{tokens:,.0f}", ""


def _sample_groups(samples: Sequence[Sample]) -> Iterator[tuple[str, Sequence[Sample]]]:
    """Samples of the first and last step, then those with the highest and lowest value of each reward."""
    for phase in ("training", "validation"):
        of_phase = [sample for sample in samples if sample.phase == phase]
        for step in sorted({s.step for s in (*of_phase[:1], *of_phase[-1:])}):
            yield f"{phase}, step {step}", [s for s in of_phase if s.step == step][:SAMPLES_SHOWN]
    scored = [sample for sample in samples if sample.phase == "training" and sample.error is None]
    for name in sorted({name for sample in scored for name in sample.rewards}):
        of_reward = [sample for sample in scored if name in sample.rewards]
        highest = max(reversed(of_reward), key=lambda s: (s.rewards[name], s.step))
        lowest = max(of_reward, key=lambda s: (-s.rewards[name], s.step))
        low, high = lowest.rewards[name], highest.rewards[name]
        if low < high:
            first = f"highest and lowest {name}: {format_number(high)} in step {highest.step}"
            yield f"{first}, {format_number(low)} in step {lowest.step}", [highest, lowest]


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name} · ")
        elif value is not None:
            flat[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n… ({len(text) - MAX_CHARACTERS:,} more characters in samples.jsonl)"


@dataclass(frozen=True)
class Chart:
    title: str
    plot: go.Figure
    wide: bool = False


@dataclass(frozen=True)
class StageTotal:
    name: str
    seconds: float  # over the run
    fraction: float  # of all stages
    color: str


def reward_chart(steps: Steps) -> Chart | None:
    """Mean reward with its spread in the batch, and validations as points; None for a run without rewards."""
    plot = empty_plot(steps, height=360)
    spread = [step for step in steps if {"reward/mean", "reward/std"} <= step.values.keys()]
    if len(spread) > 1:
        numbers = [step.step for step in spread]
        low = [step.values["reward/mean"] - step.values["reward/std"] for step in spread]
        high = [step.values["reward/mean"] + step.values["reward/std"] for step in spread]
        x, y = numbers + numbers[::-1], high + low[::-1]
        plot.add_scatter(x=x, y=y, mode="lines", name="± standard deviation", hoverinfo="skip")
        plot.update_traces(fill="toself", fillcolor="rgba(74, 139, 208, 0.18)", line={"width": 0})
    add_line(plot, steps, "reward/mean", "training", PALETTE[0], "lines")
    add_line(plot, steps, "validation/reward", "validation", PALETTE[1], "lines+markers")
    if not plot.data:
        return None
    plot.update_layout(showlegend=True, xaxis_title="step", yaxis_title="reward")
    return Chart("Reward", plot, wide=True)


def metric_charts(steps: Steps) -> tuple[list[Chart], list[Chart]]:
    """Plots of all other metrics: first those of `SHOWN` and of further validation sets, then the rest."""
    charts: dict[bool, list[Chart]] = {True: [], False: []}
    for group in metric_groups({key for step in steps for key in step.values}):
        charts[group.is_main].append(_line_chart(group.title, steps, group.names))
    return charts[True], charts[False]


def stage_chart(steps: Steps, totals: Sequence[StageTotal]) -> Chart | None:
    """Seconds of each stage, stacked, for every step; long runs show means over groups of steps."""
    timed = [step for step in steps if step.values.get("time/step", 0) > 0]
    if not timed:
        return None
    size = -(-len(timed) // MAX_BARS)
    groups = [timed[start : start + size] for start in range(0, len(timed), size)]
    plot = empty_plot(steps, height=320)
    firsts = [group[0].step for group in groups]
    for total in totals:
        seconds = [sum(stage_seconds(s).get(total.name, 0) for s in group) / len(group) for group in groups]
        plot.add_bar(x=firsts, y=seconds, name=total.name, marker_color=total.color)
    plot.update_layout(barmode="stack", bargap=0.1, showlegend=True, legend_traceorder="normal")
    xaxis_title = "step" if size == 1 else f"step (means over {size})"
    plot.update_layout(xaxis_title=xaxis_title, yaxis_title="seconds")
    return Chart("Seconds of each stage", plot, wide=True)


def stage_totals(steps: Steps) -> list[StageTotal]:
    """Seconds of each stage over all steps, the longest first; time outside of stages comes at the end."""
    sums: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, seconds in stage_seconds(step).items():
            sums[name] += seconds
    whole = sum(sums.values()) or 1.0
    ordered = sorted(sums.items(), key=lambda item: (item[0] == "other", -item[1]))
    bright = PALETTE[:-1]
    return [
        StageTotal(name, seconds, seconds / whole, REST_COLOR if name == "other" else bright[i % len(bright)])
        for i, (name, seconds) in enumerate(ordered)
    ]


def stage_seconds(step: StepMetrics) -> dict[str, float]:
    """Seconds by stage of one step; `other` is the time between the stages."""
    stages = {k.removeprefix("time/"): v for k, v in step.values.items() if k.startswith("time/")}
    whole = stages.pop("step", None)
    if whole is not None and (rest := whole - sum(stages.values())) > 0:
        stages["other"] = rest
    return stages


def _line_chart(title: str, steps: Steps, keys: Sequence[str]) -> Chart:
    plot = empty_plot(steps, height=260)
    for number, key in enumerate(keys):
        few = sum(key in step.values for step in steps) < 2
        mode = "lines+markers" if few or key.startswith("validation/") else "lines"
        name = (key.partition("/")[2] or key).replace("_", " ")
        add_line(plot, steps, key, name, PALETTE[number % len(PALETTE)], mode)
    plot.update_layout(showlegend=len(keys) > 1)
    values = [step.values[key] for step in steps for key in keys if key in step.values]
    if all(value >= 0 for value in values):
        plot.update_yaxes(rangemode="tozero")
    if shown(keys[0]).log_scale and all(value > 0 for value in values):
        plot.update_yaxes(type="log")
    return Chart(title, plot)


def add_line(plot: go.Figure, steps: Steps, key: str, name: str, color: str, mode: str) -> None:
    drawn = [step for step in steps if key in step.values]
    if drawn:
        x, y = [step.step for step in drawn], [step.values[key] for step in drawn]
        style = {"line": {"color": color, "width": 2}, "marker": {"color": color, "size": 7}}
        plot.add_scatter(x=x, y=y, name=name, mode=mode if len(drawn) > 1 else "markers", **style)


def empty_plot(steps: Steps, height: int) -> go.Figure:
    first, last = (steps[0].step, steps[-1].step) if steps else (0, 0)
    margin = max(0.02 * (last - first), 0.5)
    plot = go.Figure(layout={"template": None, "height": height, "hovermode": "x unified"})
    plot.update_layout(margin={"l": 60, "r": 16, "t": 12, "b": 32})
    plot.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0})
    dtick = 1 if last - first <= 10 else None  # no half steps
    plot.update_xaxes(automargin=True, range=[first - margin, last + margin], dtick=dtick)
    plot.update_yaxes(automargin=True, exponentformat="e")
    return plot
