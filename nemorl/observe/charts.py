"""The plots of a report. Colors that depend on the light or dark theme are set by the page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from .metrics import SHOWN, StepMetrics, shown

REST_COLOR = "#8c8c94"
PALETTE = ("#4a8bd0", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#d4a514", "#9d7660", REST_COLOR)
MAX_BARS = 200  # more steps than this are averaged in groups


@dataclass(frozen=True)
class Chart:
    """A plot with its heading."""

    title: str
    plot: go.Figure
    wide: bool = False


@dataclass(frozen=True)
class StageTotal:
    """Seconds of one stage over the run, and their part of all."""

    name: str
    seconds: float
    fraction: float
    color: str


def reward_chart(steps: Sequence[StepMetrics]) -> Chart | None:
    """Mean reward with its spread in the batch, and validations as points; None for a run without rewards."""
    plot = _plot(steps, height=360)
    spread = [step for step in steps if {"reward/mean", "reward/std"} <= step.values.keys()]
    if len(spread) > 1:
        numbers = [step.step for step in spread]
        low = [step.values["reward/mean"] - step.values["reward/std"] for step in spread]
        high = [step.values["reward/mean"] + step.values["reward/std"] for step in spread]
        plot.add_scatter(
            x=numbers + numbers[::-1],
            y=high + low[::-1],
            fill="toself",
            fillcolor="rgba(74, 139, 208, 0.18)",
            line={"width": 0},
            hoverinfo="skip",
            name="± standard deviation",
            mode="lines",
        )
    _add_line(plot, steps, "reward/mean", "training", PALETTE[0], "lines")
    _add_line(plot, steps, "validation/reward", "validation", PALETTE[1], "lines+markers")
    if not plot.data:
        return None
    plot.update_layout(showlegend=True, xaxis_title="step", yaxis_title="reward")
    return Chart("Reward", plot, wide=True)


# Metrics between 0 and 1 of one of `data.validation_sets` share a plot.
_VALIDATION_SET = re.compile(
    r"validation/(?!rewards/|distillation/)(\w+)/(reward|accuracy|pass@\d+|cons@\d+)"
)


def metric_charts(steps: Sequence[StepMetrics]) -> tuple[list[Chart], list[Chart]]:
    """Plots of all other metrics: first those of `SHOWN` and of further validation sets, then the rest."""
    found = {key for step in steps for key in step.values}
    keys = sorted(key for key in found if key.removesuffix("_low").removesuffix("_high") not in found - {key})
    of_set = {
        key: f"Validation: {match[1]}"
        for key in keys
        if (match := _VALIDATION_SET.fullmatch(key)) is not None
    }
    titles = dict.fromkeys([row.title for row in SHOWN if row.title] + list(of_set.values()))
    grouped: dict[str, list[str]] = {title: [] for title in titles}
    for key in sorted(keys, key=lambda key: SHOWN.index(shown(key)) if shown(key) in SHOWN else len(SHOWN)):
        if title := of_set.get(key, shown(key).title):
            grouped.setdefault(title, []).append(key)
    charts = {title: _line_chart(title, steps, members) for title, members in grouped.items() if members}
    main = [chart for title, chart in charts.items() if title in titles]
    return main, [chart for title, chart in charts.items() if title not in titles]


def stage_chart(steps: Sequence[StepMetrics], totals: Sequence[StageTotal]) -> Chart | None:
    """Seconds of each stage, stacked, for every step; long runs show means over groups of steps."""
    timed = [step for step in steps if step.values.get("time/step", 0) > 0]
    if not timed:
        return None
    size = -(-len(timed) // MAX_BARS)
    groups = [timed[start : start + size] for start in range(0, len(timed), size)]
    plot = _plot(steps, height=320)
    for total in totals:
        seconds = [
            sum(stage_seconds(step).get(total.name, 0) for step in group) / len(group) for group in groups
        ]
        plot.add_bar(
            x=[group[0].step for group in groups], y=seconds, name=total.name, marker_color=total.color
        )
    plot.update_layout(
        barmode="stack",
        bargap=0.1,
        showlegend=True,
        legend_traceorder="normal",
        xaxis_title="step" if size == 1 else f"step (means over {size})",
        yaxis_title="seconds",
    )
    return Chart("Seconds of each stage", plot, wide=True)


def stage_totals(steps: Sequence[StepMetrics]) -> list[StageTotal]:
    """Seconds of each stage over all steps, the longest first; time outside of stages comes at the end."""
    sums: dict[str, float] = {}
    for step in steps:
        for name, seconds in stage_seconds(step).items():
            sums[name] = sums.get(name, 0.0) + seconds
    whole = sum(sums.values()) or 1.0
    ordered = sorted(sums.items(), key=lambda item: (item[0] == "other", -item[1]))
    bright = PALETTE[:-1]
    return [
        StageTotal(name, seconds, seconds / whole, REST_COLOR if name == "other" else bright[i % len(bright)])
        for i, (name, seconds) in enumerate(ordered)
    ]


def stage_seconds(step: StepMetrics) -> dict[str, float]:
    """Seconds by stage of one step; `other` is the time between the stages."""
    stages = {
        key.removeprefix("time/"): value for key, value in step.values.items() if key.startswith("time/")
    }
    whole = stages.pop("step", None)
    if whole is not None and (rest := whole - sum(stages.values())) > 0:
        stages["other"] = rest
    return stages


def _line_chart(title: str, steps: Sequence[StepMetrics], keys: Sequence[str]) -> Chart:
    plot = _plot(steps, height=260)
    for number, key in enumerate(keys):
        few = sum(key in step.values for step in steps) < 2
        mode = "lines+markers" if few or key.startswith("validation/") else "lines"
        name = (key.partition("/")[2] or key).replace("_", " ")
        _add_line(plot, steps, key, name, PALETTE[number % len(PALETTE)], mode)
    plot.update_layout(showlegend=len(keys) > 1)
    values = [step.values[key] for step in steps for key in keys if key in step.values]
    if all(value >= 0 for value in values):
        plot.update_yaxes(rangemode="tozero")
    if shown(keys[0]).log_scale and all(value > 0 for value in values):
        plot.update_yaxes(type="log")
    return Chart(title, plot)


def _add_line(
    plot: go.Figure,
    steps: Sequence[StepMetrics],
    key: str,
    name: str,
    color: str,
    mode: str,
) -> None:
    drawn = [step for step in steps if key in step.values]
    if drawn:
        plot.add_scatter(
            x=[step.step for step in drawn],
            y=[step.values[key] for step in drawn],
            name=name,
            mode=mode if len(drawn) > 1 else "markers",
            line={"color": color, "width": 2},
            marker={"color": color, "size": 7},
        )


def _plot(steps: Sequence[StepMetrics], height: int) -> go.Figure:
    first, last = (steps[0].step, steps[-1].step) if steps else (0, 0)
    margin = max(0.02 * (last - first), 0.5)
    return go.Figure(
        layout={
            "template": None,
            "height": height,
            "margin": {"l": 60, "r": 16, "t": 12, "b": 32},
            "hovermode": "x unified",
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "xaxis": {
                "automargin": True,
                "range": [first - margin, last + margin],
                "dtick": 1 if last - first <= 10 else None,  # no half steps
            },
            "yaxis": {"automargin": True, "exponentformat": "e"},
        }
    )
